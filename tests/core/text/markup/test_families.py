"""What the fixtures of `canitoolcall` do not have: forms, mistakes and cuts of answers, family by family.

gpt-oss's answers are read as OpenAI's own library reads them. `harmony_answers.json` has random answers as pieces, [text, 1 where
it is one special token], each with the messages that `openai-harmony` 0.0.8 reads in it. The library takes any text in a header,
and a marker inside a message as text, where this parser lets the marker begin the next message; answers of these kinds are left
out. Together they have every run of four pieces (markers, headers, kinds of text) and every end that 169 random ones had. Git has
the script that recorded them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from canitoolcall.results import ParsedToolCall, ParseResult

from tests.core.text.markup.canitoolcall_fixtures import FixtureTokenizer, parse_result, read_answer
from transom_core.errors import RequestError
from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.families.harmony import MARKERS, HarmonyFormat
from transom_core.text.markup.formats import answer_format
from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    MessageText,
    ReasoningText,
)

_TOOLS = (
    ToolSpec(
        "f",
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "object"}}},
    ),
    ToolSpec("g", {"type": "object", "properties": {}}),
)
TOKENIZER = FixtureTokenizer(MARKERS)
PROMPT_END = "<|start|>assistant"
ANSWERS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("harmony_answers.json").read_text("utf-8"))


def _read(
    text: str, tools: str | None, reasoning: str | None = None, *, prompt_end: str = "", special: tuple[str, ...] = ()
) -> list[AnswerPart]:
    context = AnswerContext(_TOOLS, parses_tools=True, parses_reasoning=True, prompt_end=prompt_end)
    tokenizer = FixtureTokenizer(special)
    tokens = tokenizer.cut(text, shows_special=False)
    return read_answer(answer_format(tools, reasoning).parser(tokenizer, context), tokens)


def _call(arguments: str, *, index: int = 0, name: str = "f", is_complete: bool = True) -> list[AnswerPart]:
    pieces = [CallArguments(index, arguments)] if arguments else []
    return [CallBegin(index, name), *pieces, CallEnd(index, is_complete)]


_SECOND = _call("{}", index=1, name="g")
_ANSWERS: dict[str, list[tuple[str, list[AnswerPart]]]] = {
    "hermes": [
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d x\\ude00\\ud83d\\ude00\\ud83d"}}\n</tool_call>',
            _call('{"a": "\\ufffd x\\ufffd\\ud83d\\ude00\\ufffd"}'),
        ),
        ('<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>', _call('{"a": "x"}')),
        ('<tool_call>{"id": 1, "name": "f"}</tool_call>', _call("{}")),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', _call('{"a": 1}')),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2\\d"}}</tool_call>', _call('{"a": "1\\n2\\\\d"}')),
        ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>', [*_call("{}"), *_SECOND]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call> after',
            [*_call('{"a": tru', is_complete=False), MessageText("}}</tool_call> after")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [CallBegin(0, "f"), CallEnd(0, False), MessageText(', "arguments": [1]}</tool_call>')],
        ),
        (
            "Look: <tool_call>nothing</tool_call>",
            [MessageText("Look:"), MalformedMarkup("<tool_call>"), MessageText(" <tool_call>nothing</tool_call>")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "x"}}\n</tool_c',
            [*_call('{"a": "x"}'), MalformedMarkup("\n</tool_c")],
        ),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"b": 1}}; {"name": "g", "parameters": {}}', [*_call('{"b": 1}'), *_SECOND]),
        ('{"name": "f", "parameters": {"b": 1}}\n{"name": "g", "parameters": {}}', [*_call('{"b": 1}'), *_SECOND]),
        ('{"type": "function", "name": "f", "parameters": {}}', _call("{}")),
        ('{"name": "unknown", "parameters": {}}', [MessageText('{"name": "unknown", "parameters": {}}')]),
        ('{"name": "f"}', [MessageText('{"name": "f"}')]),
        ('{"tool_name": "f", "parameters": {}}', [MessageText('{"tool_name": "f", "parameters": {}}')]),
        ('{"name": "f", "par', [MessageText('{"name": "f", "par')]),
        ('Say {"name": "f", "parameters": {}}', [MessageText('Say {"name": "f", "parameters": {}}')]),
        ("<|python_tag|>print(1)", [MalformedMarkup("<|python_tag|>"), MessageText("<|python_tag|>print(1)")]),
    ],
    "cohere_command3": [
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "x"}},\n'
            '    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
            [*_call('{"a": "x"}'), *_SECOND],
        )
    ],
    "pythonic": [
        ("[f(a='''it's\n\"so\"''')]", _call('{"a": "it\'s\\n\\"so\\""}')),
        ("[f(a='\\x41\\101\\u00e9\\U0001F600\\d\\\nz')]", _call('{"a": "AA\\u00e9\\ud83d\\ude00\\\\dz"}')),
        (
            "[f(b=1_000, c=+5, d=.5, e=0x1F, g=(1, 'x',), h={1: None,},)]",
            _call('{"b": 1000, "c": 5, "d": 0.5, "e": 31, "g": [1, "x"], "h": {"1": null}}'),
        ),
        ("[ f ( a = 'x' ) ]", _call('{"a": "x"}')),
        ("[f(a={'k': [True, False, None, true]})]", _call('{"a": {"k": [true, false, null, true]}}')),
        ("[f(a='')]", _call('{"a": ""}')),
        ("[f('x')]", [*_call("", is_complete=False), MessageText("'x')]")]),
    ],
    "lfm2": [
        (
            "<|tool_call_start|>[g()]<|tool_call_end|>[g()]<|tool_call_end|>Done",
            [*_call("{}", name="g"), MalformedMarkup("[g()]"), MessageText("Done")],
        ),
        ("<|tool_call_start|>[g()]<|tool_call_end|>[1] is", [*_call("{}", name="g"), MessageText("[1] is")]),
    ],
    "nemotron_json": [('<TOOLCALL>{"name": "f", "arguments": {"b": 1}}</TOOLCALL>', _call('{"b": 1}'))],
    "deepseek_v4": [
        (
            '<｜DSML｜tool_calls><｜DSML｜invoke name="x<y"></｜DSML｜invoke></｜DSML｜tool_calls>',
            _call("{}", name="x<y"),
        )
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=f>\n<parameter=c>\n{'x': ['\\/', \"\\/\"], 'y': True}\n</parameter>\n</function>\n</tool_call>",
            _call('{"c": {"x": ["/", "/"], "y": true}}'),
        )
    ],
    "seed_oss": [
        (
            "<seed:tool_call><function=f><parameter=c>{'x': [1, None]}</parameter></function></seed:tool_call>",
            _call('{"c": {"x": [1, null]}}'),
        ),
        (
            "<seed:tool_call>\n<function=f>\n<parameter=a>\nx</parameter> y\n</parameter>\n<parameter=b>2</parameter>\n"
            "</function>\n</seed:tool_call>",
            _call('{"a": "\\nx</parameter> y\\n", "b": 2}'),
        ),
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="b">2</parameter>\n'
            '</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            [*_call('{"a": "1", "b": 2}'), *_SECOND],
        )
    ],
    "mistral": [
        ('[TOOL_CALLS]{"name": "f", "arguments": {}}', _call("{}")),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "1"}] bye', [*_call("{}"), MessageText(" bye")]),
    ],
}


@pytest.mark.parametrize(
    ("tools", "text", "parts"), [(tools, *row) for tools, rows in _ANSWERS.items() for row in rows]
)
def test_calls(tools: str, text: str, parts: list[AnswerPart]) -> None:
    assert _read(text, tools) == parts


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[a link](https://example.org)", "[unknown(a=1)]", "[f", "[]", "The list [f(a=1)]"]
)
def test_other_lists_are_the_message(text: str) -> None:
    assert _read(text, "pythonic") == [MessageText(text)]


@pytest.mark.parametrize("opener", ["<|tool_call|>", "<tool_call>"])
def test_granite(opener: str) -> None:
    text = f'Here is my thought process: hm. Here is my response: Sure.\n{opener}[{{"name": "f", "arguments": {{}}}}]'
    assert _read(text, "granite", "granite") == [ReasoningText("hm."), MessageText("Sure."), *_call("{}")]


def test_special_tokens_without_text_are_read_in_arguments_only() -> None:
    special = ("<|start|>", "<tool_call>", "</tool_call>")
    text = 'A<|start|>B<tool_call>{"name": "f", "arguments": {"a": "C<|start|>D<tool_call>"}}</tool_call>'
    assert _read(text, "hermes", special=special) == [MessageText("AB"), *_call('{"a": "C<|start|>D<tool_call>"}')]


@pytest.mark.parametrize(
    ("reasoning", "prompt_end", "text", "parts"),
    [
        ("qwen3", "", "<think>\nhm\n</think>\n\nYes", [ReasoningText("hm"), MessageText("Yes")]),
        ("qwen3", "<think>\n", "hm</think>Yes", [ReasoningText("hm"), MessageText("Yes")]),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes</think>", [MessageText("Yes</think>")]),
        ("qwen3", "", "Use <think> tags", [MessageText("Use <think> tags")]),
        ("deepseek_r1", "", "hm</think>Yes", [ReasoningText("hm"), MessageText("Yes")]),
        ("deepseek_r1", "", "<think>hm</think>Yes", [ReasoningText("<think>hm"), MessageText("Yes")]),
        ("deepseek_r1", "</think>", "Yes", [MessageText("Yes")]),
        ("mistral", "", "[THINK]a</think>b[/THINK]Yes", [ReasoningText("a</think>b"), MessageText("Yes")]),
        ("seed_oss", "<seed:cot_budget_reflect>\n", "a</seed:think>Yes", [ReasoningText("a"), MessageText("Yes")]),
        (
            "seed_oss",
            "<seed:think>",
            "a<seed:cot_budget_reflect>b</seed:think>Yes",
            [ReasoningText("a<seed:cot_budget_reflect>b"), MessageText("Yes")],
        ),
        (
            "cohere_command3",
            "",
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            [ReasoningText("hm"), MessageText("Yes.")],
        ),
        (
            "cohere_command4",
            "<|START_THINKING|>",
            "hm<|START_TEXT|>Yes.<|END_TEXT|>",
            [ReasoningText("hm"), MessageText("Yes.")],
        ),
        ("qwen3", "", "Yes \n", [MessageText("Yes \n")]),
        ("qwen3", "", "<think>hm</think>\n", [ReasoningText("hm")]),
    ],
)
def test_reasoning(reasoning: str, prompt_end: str, text: str, parts: list[AnswerPart]) -> None:
    assert _read(text, None, reasoning, prompt_end=prompt_end) == parts


def test_a_call_ends_the_reasoning_and_a_mention_does_not() -> None:
    call = '<tool_call>{"name": "g"}</tool_call>'
    assert _read(f"<think>hm {call}", "hermes", "qwen3") == [ReasoningText("hm"), *_call("{}", name="g")]
    assert _read("<think>write <tool_call> or not</think>Yes", "hermes", "qwen3") == [
        ReasoningText("write <tool_call> or not"),
        MessageText("Yes"),
    ]


def test_a_parser_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(RequestError, match=r"no tool call parser 'nothing'.*hermes"):
        answer_format("nothing", None)
    with pytest.raises(RequestError, match=r"no reasoning parser 'nothing'.*qwen3"):
        answer_format(None, "nothing")


def _context(*, prompt_end: str = PROMPT_END, parses_tools: bool = True) -> AnswerContext:
    tools = (ToolSpec("f"), ToolSpec("get_weather"))
    return AnswerContext(tools, parses_tools=parses_tools, parses_reasoning=True, prompt_end=prompt_end)


def _read_harmony(pieces: list[tuple[str, int]], context: AnswerContext) -> list[AnswerPart]:
    """The parts of an answer of special tokens, and of ordinary text that is cut into characters."""
    tokens: list[tuple[int, str]] = []
    for text, is_special in pieces:
        tokens += [(TOKENIZER.marker_id(text) or 0, "")] if is_special else [(0, character) for character in text]
    return read_answer(HarmonyFormat().parser(TOKENIZER, context), tokens)


def _cut(text: str) -> list[tuple[str, int]]:
    tokens = TOKENIZER.cut(text, shows_special=False)
    return [(TOKENIZER.token(i) or piece, int(TOKENIZER.is_special(i))) for i, piece in tokens]


def _said_by_the_library(messages: list[dict[str, Any]]) -> ParseResult:
    calls = [message for message in messages if message["recipient"]]
    others = [message for message in messages if not message["recipient"]]
    thoughts = [message["text"] for message in others if message["channel"] == "analysis" and message["text"]]
    return ParseResult(
        content="".join(message["text"] for message in others if message["channel"] != "analysis") or None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=tuple(ParsedToolCall(one["recipient"].removeprefix("functions."), one["text"]) for one in calls),
    )


def test_answers_are_read_as_openais_library_reads_them() -> None:
    for answer in ANSWERS:
        found = parse_result(_read_harmony(answer["pieces"], _context()))
        assert found == _said_by_the_library(answer["messages"]), answer


@pytest.mark.parametrize(
    ("text", "context", "parts"),
    [
        # It goes on from a header that the prompt has begun.
        ("Rain.<|return|>", _context(prompt_end=f"{PROMPT_END}<|channel|>final<|message|>"), [MessageText("Rain.")]),
        (
            "Rain?<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            _context(prompt_end=f"{PROMPT_END}<|channel|>analysis<|message|>"),
            [ReasoningText("Rain?"), MessageText("Yes.")],
        ),
        # A message for a tool that there is not is counted and not shown.
        (
            "<|channel|>commentary to=python <|constrain|>code<|message|>print(1)<|call|>",
            _context(),
            [MalformedMarkup("print(1)")],
        ),
        # A call is a message where the request has no tools.
        (
            '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
            _context(parses_tools=False),
            [MessageText('{"a": 1}')],
        ),
        # Arguments that are no object leave the call incomplete.
        (
            "<|channel|>commentary to=functions.f<|message|>[1]<|call|>",
            _context(),
            [CallBegin(0, "f"), CallEnd(0, is_complete=False), MessageText("[1]")],
        ),
    ],
)
def test_an_answer(text: str, context: AnswerContext, parts: list[AnswerPart]) -> None:
    assert _read_harmony(_cut(text), context) == parts


@pytest.mark.parametrize("names", [("openai", None), (None, "openai_gptoss"), ("openai", "openai_gptoss")])
def test_either_name_stands_for_the_whole_format(names: tuple[str | None, str | None]) -> None:
    assert isinstance(answer_format(*names), HarmonyFormat)


@pytest.mark.parametrize("text", ["Rain is likely.", " tomorrow", "tonight it", "to", '{"a": 1}'])
def test_an_answer_without_a_header_is_a_message_as_it_comes(text: str) -> None:
    parser = HarmonyFormat().parser(TOKENIZER, _context())
    parts = [part for character in text for part in parser.push(0, character)]
    assert parts or text == "to"
    assert "".join(part.text for part in (*parts, *parser.flush()) if isinstance(part, MessageText)) == text
