"""What a grammar allows, the parser of the same format reads back: random answers of every family, held to its grammar. And random
schemas as tools in every family's markup: what its grammar allows is a call that is valid, or the schema is refused."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.core.grammar.random_schemas import random_schema
from tests.core.text.markup.canitoolcall_fixtures import call_arguments, read_answer
from tests.core.text.markup.grammar_walks import MARKERS, WalkTokenizer, compiled, walk, with_texts
from tests.how_many import num_examples
from tests.present import present
from transom_core.errors import RequestError
from transom_core.text.markup.context import (
    AnswerContext,
    ChoiceAnswer,
    FreeAnswer,
    JsonAnswer,
    LarkAnswer,
    MessageDemand,
    RegexAnswer,
    ToolsDemand,
    ToolSpec,
)
from transom_core.text.markup.formats import TOOL_PARSERS, answer_format
from transom_core.text.markup.parts import AnswerPart, CallBegin, CallEnd, MalformedMarkup, MessageText, ReasoningText

_TOOL_HINTS = ('"', "}", "]", ">", "\n", "\n</parameter>")


class Family(NamedTuple):
    """A family's parsers and the tokens that mark its answers; `call` is how a call begins after the text `before`."""

    tools: str | None
    reasoning: str | None = None
    markers: tuple[str, ...] = MARKERS
    call: str = ""
    before: str = "Let me see. "
    may_be_text: bool = True  # its markers may be ordinary text, too

    @property
    def name(self) -> str:
        return f"{self.tools}-{self.reasoning}"


THINK = ("<think>", "</think>")
GLM = (*THINK, *["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
SECTIONS = (
    *(*THINK, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
KIMI_K2 = (
    *(*THINK, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
HARMONY = tuple(["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"])
DSML = (*THINK, "｜DSML｜")
MINIMAX = (*THINK, "<minimax:tool_call>", "</minimax:tool_call>")
SEED = ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")
LFM2 = (*THINK, "<|tool_call_start|>", "<|tool_call_end|>")
COHERE = (
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>"),
)
FAMILIES = [
    Family("hermes"),
    Family("hermes", "qwen3"),
    Family("hermes", "deepseek_r1"),
    Family("llama3_json"),
    Family("llama4_pythonic"),
    Family("pythonic", "qwen3"),
    Family("mistral", "mistral"),
    Family("granite", "granite"),
    Family("qwen3_coder", "qwen3"),
    Family("gemma4", "gemma4", GEMMA, call="<|tool_call>"),
    Family("glm45", "glm45", GLM, call="<tool_call>"),
    Family("glm47", "glm45", GLM, call="<tool_call>"),
    Family("kimi_k2", "kimi_k2", KIMI_K2, call="<|tool_calls_section_begin|>"),
    Family("deepseek_v3", "deepseek_v3", SECTIONS, call="<｜tool▁calls▁begin｜>"),
    Family("deepseek_v31", "deepseek_v3", SECTIONS, call="<｜tool▁calls▁begin｜>"),
    Family("deepseek_v32", "deepseek_v3", DSML, call="<｜DSML｜function_calls>"),
    Family("minimax_m2", "minimax_m2", MINIMAX, call="<minimax:tool_call>"),
    Family("seed_oss", "seed_oss", SEED, call="<seed:tool_call>"),
    Family("lfm2", "qwen3", LFM2, call="<|tool_call_start|>"),
    Family("olmo3", "olmo3", THINK, call="<function_calls>"),
    Family("nemotron_json", "qwen3", THINK, call="<TOOLCALL>"),
    Family("cohere_command3", "cohere_command3", COHERE, call="<|START_ACTION|>"),
    Family("jamba", "qwen3", THINK, call="<tool_calls>"),
    Family("deepseek_v4", "deepseek_v4", DSML, call="<｜DSML｜tool_calls>"),
    Family("deepseek_v41", "deepseek_v41", DSML, call="<｜DSML｜ calls>"),
    Family(*("openai", "openai_gptoss", HARMONY), call="<|channel|>commentary to=", before="", may_be_text=False),
]
EACH_FORM = pytest.mark.parametrize(
    ("family", "ordinary"),
    [(one, ordinary) for one in FAMILIES for ordinary in ((False, True) if one.may_be_text else (False,))],
    ids=lambda value: value.name if isinstance(value, Family) else ("ordinary" if value else "markers"),
)
_HINTS = (
    *("Here is my response:", "</think>", "[/THINK]", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>"),
    *("<|tool_call>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<channel|>", "<|end|>", "｜DSML｜"),
    *("<minimax:tool_call>", "<seed:tool_call>", "</seed:think>", "<|tool_call_start|>"),
    *('<|"|>', "</arg_value>", "</tool_call>", "\n</parameter>", "<", "</", '"', "}", "]", ">", "\n"),
)

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "code": {"type": "string", "pattern": "^[A-Z]{2,3}$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["c", "f", None, 3]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}, "note": {"type": "string"}},
            "required": ["on"],
            "additionalProperties": False,
        },
        "count": {"type": ["integer", "null"]},
        "text": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
    },
    "required": ["text", "city", "tags", "count"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string"}},
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"const": "n"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "additionalProperties": False,
        }
    },
}
CHOICE: dict[str, Any] = {
    "type": "object",
    "anyOf": [
        {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
        {"properties": {"b": {"type": ["number", "null"]}}, "required": ["b"], "additionalProperties": False},
    ],
}
LOOP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        "w": {"$ref": "#/properties/v"},
        "u": {"type": "array", "items": {"$ref": "#/properties/v"}, "maxItems": 3},
    },
    "required": ["v", "kids", "u"],
    "additionalProperties": False,
}
TOOLS = (
    ToolSpec("loop", LOOP, strict=True),
    ToolSpec("place", PLACE, strict=True),
    ToolSpec("tree", TREE, strict=True),
    ToolSpec("choice", CHOICE, strict=True),
    ToolSpec("ping", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
    ToolSpec("anything", {}, strict=True),
)
NAMES = tuple(tool.name for tool in TOOLS)


def check_calls(parts: list[AnswerPart], tools: Sequence[ToolSpec]) -> int:
    """The number of calls, all of which are complete and valid."""
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    assert [part.is_complete for part in parts if isinstance(part, CallEnd)] == [True] * len(names), parts
    assert not [part for part in parts if isinstance(part, MalformedMarkup)], parts
    for index, name in enumerate(names):
        (tool,) = [tool for tool in tools if tool.name == name]
        jsonschema.Draft202012Validator(tool.parameters).validate(json.loads(call_arguments(parts, index)))
    return len(names)


def message_of(parts: list[AnswerPart]) -> str:
    """The text beside reasoning and calls."""
    return "".join(part.text for part in parts if isinstance(part, MessageText))


def walks(
    family: Family,
    *,
    ordinary: bool = False,
    message: MessageDemand,
    tools: ToolsDemand | None = None,
    prompt_end: str = "",
    begin: str = "",
) -> list[list[AnswerPart]]:
    """The parts of complete random answers, which begin with `begin`."""
    tokenizer = WalkTokenizer(ordinary=ordinary, markers=family.markers)
    context = AnswerContext(
        TOOLS, parses_tools=tools is not None, parses_reasoning=family.reasoning is not None, prompt_end=prompt_end
    )
    form = answer_format(family.tools, family.reasoning)
    grammar = present(form.grammar(tokenizer, context, message=message, tools=tools))
    hints = [hint for hint in _HINTS if hint in tokenizer.texts]
    start = compiled(tokenizer, grammar)
    answers = [
        walk(tokenizer, start, seed=seed, hints=hints, begin=begin)
        for seed in range(num_examples(4 if family.call else 12, 200))
    ]
    complete = [answer for answer in answers if answer.is_complete]
    assert len(complete) > len(answers) / 3
    parsed = [read_answer(form.parser(tokenizer, context), answer.tokens) for answer in complete]
    return [parts for parts in parsed if not repeats_a_name(parts)]


def repeats_a_name(parts: list[AnswerPart]) -> bool:
    """Whether a call of `anything` ended as malformed: it has two arguments of one name, which no grammar can forbid."""
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    are_complete = [part.is_complete for part in parts if isinstance(part, CallEnd)]
    return ("anything", False) in zip(names, are_complete, strict=True)


@EACH_FORM
def test_required_calls_are_valid_and_nothing_else(family: Family, ordinary: bool) -> None:
    for parts in walks(family, ordinary=ordinary, message=FreeAnswer(), tools=ToolsDemand("required", NAMES)):
        assert check_calls(parts, TOOLS) >= 1
        assert not message_of(parts).strip()


@EACH_FORM
def test_calls_in_a_free_message_are_valid(family: Family, ordinary: bool) -> None:
    how: dict[str, Any] = {"ordinary": ordinary, "message": FreeAnswer(), "tools": ToolsDemand("auto", NAMES)}
    counts = [check_calls(parts, TOOLS) for parts in walks(family, **how)]
    if not family.call:
        assert any(counts)
        return
    for parts in walks(family, **how, begin=family.before + family.call):
        assert check_calls(parts, TOOLS) >= 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_message_is_json_or_a_call(family: Family) -> None:
    prompts = [""] if family.call or family.reasoning is None else ["", "<think>\n", "<think>\n\n</think>\n\n"]
    for prompt_end in prompts:
        for parts in walks(family, message=JsonAnswer(PLACE), tools=ToolsDemand("auto", NAMES), prompt_end=prompt_end):
            if not check_calls(parts, TOOLS):
                jsonschema.Draft202012Validator(PLACE).validate(json.loads(message_of(parts)))


@pytest.mark.parametrize(
    ("message", "is_valid"),
    [
        (JsonAnswer(), lambda text: isinstance(json.loads(text), dict)),
        (JsonAnswer({"type": "array", "items": {"type": "integer"}}), lambda text: isinstance(json.loads(text), list)),
        (LarkAnswer('start: "a" b\nb: "b/{" | "c"'), lambda text: text in ("ab/{", "ac")),
        (RegexAnswer("a/b\\/[0-9]"), lambda text: text[:4] == "a/b/" and text[4].isdigit()),
        (ChoiceAnswer(("yes\n", 'no"')), lambda text: text in ("yes\n", 'no"')),
    ],
    ids=["object", "array", "lark", "regex", "choice"],
)
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
def test_a_message_is_what_it_has_to_be(message, is_valid, reasoning) -> None:
    for parts in walks(Family(None, reasoning), message=message):
        assert is_valid(message_of(parts)), message_of(parts)


@pytest.mark.parametrize(
    ("parsers", "prompt_end", "marker"),
    [
        (("hermes", None), "", "<tool_call>"),
        (("hermes", "qwen3"), "<think>", "<tool_call>"),
        (("hermes", "qwen3"), "<think>", "</think>"),
        (("llama3_json", None), "", "<|python_tag|>"),
        (("llama4_pythonic", None), "", "<|python_start|>"),
        (("mistral", "mistral"), "", "[TOOL_CALLS]"),
        (("mistral", "mistral"), "[THINK]", "[/THINK]"),
        (("granite", None), "", "<tool_call>"),
        (("qwen3_coder", None), "", "<function="),
    ],
)
def test_a_marker_that_is_a_token_cannot_be_spelled(parsers, prompt_end, marker) -> None:
    """A parser takes the letters for the marker, so that what follows would escape the grammar."""
    tokenizer = WalkTokenizer()
    context = AnswerContext(TOOLS, parses_tools=True, parses_reasoning=True, prompt_end=prompt_end)
    demand = ToolsDemand("auto", NAMES)
    grammar = present(answer_format(*parsers).grammar(tokenizer, context, message=FreeAnswer(), tools=demand))
    letters = tokenizer(f"Hi {marker}".encode())
    assert LLMatcher(tokenizer.library, grammar).validate_tokens(letters) == len(letters) - 1


@pytest.mark.parametrize("ordinary", [False, True], ids=["markers", "ordinary"])
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("a </parameter> tag", True),
        ("a </parameter>\n<parameter=city> tag", False),
        ("a </parameter> </function>", False),
        ("a\n</function> and </tool_call>", True),
        ("a\n</function>\n</tool_call>", False),
        ("a\n<parameter=other>", True),
        ("a\n<parameter=city>", False),
    ],
)
def test_a_string_of_qwen3_coder_has_nothing_that_its_parser_takes_for_the_end(
    text: str, is_allowed: bool, ordinary: bool
) -> None:
    """Regression: the grammar allowed tags as text inside a string, at which the parser ended the argument."""
    tokenizer = WalkTokenizer(ordinary=ordinary)
    form, demand = answer_format("qwen3_coder"), ToolsDemand("required", ("note",), parallel=False)
    note = ToolSpec("note", {"type": "object", "properties": {name: {"type": "string"} for name in ("text", "city")}})
    context = AnswerContext((note,), parses_tools=True)
    grammar = present(form.grammar(tokenizer, context, message=FreeAnswer(), tools=demand))
    matcher = LLMatcher(tokenizer.library, grammar)
    call = tokenizer.cut("<tool_call>") + tokenizer(f"\n<function=note>\n<parameter=text>\n{text}".encode())
    end = tokenizer(b"\n</parameter>\n</function>\n") + tokenizer.cut("</tool_call>")
    assert (matcher.validate_tokens(call + end) == len(call + end)) is is_allowed
    if is_allowed:
        parts = read_answer(form.parser(tokenizer, context), [(i, tokenizer.token(i)) for i in call + end])
        assert json.loads(call_arguments(parts, 0)) == {"text": text}


SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("command", "directory")},
}
_FUNCTION = "<function=shell>\n<parameter=command>|ls|</parameter>\n<parameter=directory>|/|</parameter>\n</function>\n"
_GLM = (
    "shell|<arg_key>command</arg_key>|<arg_value>ls</arg_value>|<arg_key>directory</arg_key>|<arg_value>/</arg_value>|"
)
_PYTHON = 'shell(command="ls", directory="/")'


def _tags(block: str, token: str, string: str) -> str:
    """A call with two arguments in tags like XML."""
    texts = {"command": "ls", "directory": "/"}
    lines = [f'<{token}parameter name="{name}"{string}>{text}</{token}parameter>\n' for name, text in texts.items()]
    call = f'<{token}invoke name="shell">\n{"".join(lines)}</{token}invoke>\n'
    return f"<{token.strip()}{block}>\n{call}</{token.strip()}{block}>"


TWO_ARGUMENTS = {  # parser -> a call with two arguments
    "qwen3_coder": f"<tool_call>\n{_FUNCTION}</tool_call>".replace("|", "\n"),
    "seed_oss": f"<seed:tool_call>\n{_FUNCTION}</seed:tool_call>".replace("|", ""),
    "glm45": f"<tool_call>{_GLM}</tool_call>".replace("|", "\n"),
    "glm47": f"<tool_call>{_GLM}</tool_call>".replace("|", ""),
    "gemma4": '<|tool_call>call:shell{command:<|"|>ls<|"|>,directory:<|"|>/<|"|>}<tool_call|>',
    "pythonic": f"[{_PYTHON}]",
    "lfm2": f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>",
    "olmo3": f"<function_calls>\n{_PYTHON}\n</function_calls>",
    "minimax_m2": _tags("minimax:tool_call", "", ""),
    "deepseek_v32": _tags("function_calls", "｜DSML｜", ' string="true"'),
    "deepseek_v41": _tags(" calls", "｜DSML｜ ", ' string="true"'),
    "hermes": '<tool_call>\n{"name": "shell", "arguments": {"command": "ls", "directory": "/"}}\n</tool_call>',
}


@pytest.mark.parametrize(
    ("shell", "demand"),
    [
        (ToolSpec("shell", SHELL), ToolsDemand("auto", ("shell",), parallel=False)),
        (ToolSpec("shell", SHELL), ToolsDemand("auto", ("shell", "place"))),  # `place` is strict
        (ToolSpec("shell", {"type": "object"}), ToolsDemand("required", ("shell",))),
    ],
    ids=["no parallel calls", "another tool is strict", "a bare object"],
)
@pytest.mark.parametrize("parser", TWO_ARGUMENTS)
def test_arguments_that_are_not_held_may_be_several(parser: str, shell: ToolSpec, demand: ToolsDemand) -> None:
    tokenizer, form = WalkTokenizer(markers=()), answer_format(parser)
    context = AnswerContext((shell, TOOLS[1]), parses_tools=True)
    matcher = compiled(tokenizer, present(form.grammar(tokenizer, context, message=FreeAnswer(), tools=demand)))
    call = tokenizer(TWO_ARGUMENTS[parser].encode())
    assert matcher.consume_tokens(call)
    assert matcher.is_accepting()
    parts = read_answer(form.parser(tokenizer, context), with_texts(tokenizer, call))
    assert json.loads(call_arguments(parts, 0)) == {"command": "ls", "directory": "/"}
    assert [part.is_complete for part in parts if isinstance(part, CallEnd)] == [True]


@pytest.mark.parametrize(("parser", "markers"), [("gemma4", GEMMA), ("glm47", GLM), ("deepseek_v4", DSML)])
def test_a_schema_that_the_notation_cannot_hold_is_refused_by_the_keyword(
    parser: str, markers: tuple[str, ...]
) -> None:
    tools = (ToolSpec("t", {"type": "object", "patternProperties": {"^a": {}}}, strict=True),)
    context = AnswerContext(tools, parses_tools=True)
    tokenizer = WalkTokenizer(markers=markers)
    with pytest.raises(RequestError, match="patternProperties"):
        answer_format(parser).grammar(tokenizer, context, message=FreeAnswer(), tools=ToolsDemand("required", ("t",)))


@pytest.mark.parametrize("ordinary", [False, True], ids=["markers", "ordinary"])
@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_calls_of_random_tools_are_valid(parser: str, ordinary: bool) -> None:
    tokenizer, form = WalkTokenizer(ordinary=ordinary), answer_format(parser)
    demand, num_valid = ToolsDemand("required", ("f",), parallel=False), 0
    for seed in range(num_examples(6, 200)):
        tool = ToolSpec("f", random_schema(random.Random(seed)), strict=True)
        context = AnswerContext((tool,), parses_tools=True)
        try:
            grammar = form.grammar(tokenizer, context, message=FreeAnswer(), tools=demand)
        except RequestError:
            continue
        start = compiled(tokenizer, present(grammar))
        answer = walk(tokenizer, start, seed=seed, hints=_TOOL_HINTS, longest=800)
        if answer.is_complete:
            arguments = _only_call(read_answer(form.parser(tokenizer, context), answer.tokens))
            jsonschema.Draft202012Validator(tool.parameters).validate(json.loads(arguments))
            num_valid += 1
    assert num_valid


def _only_call(parts: Iterable[AnswerPart]) -> str:
    """The arguments of the call that an answer is."""
    parts = list(parts)
    assert [part for part in parts if isinstance(part, MessageText | ReasoningText)] == []
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f"]
    assert [part.is_complete for part in parts if isinstance(part, CallEnd)] == [True]
    return call_arguments(parts, 0)


@pytest.mark.parametrize(
    ("parser", "name"), [("pythonic", "a b"), ("qwen3_coder", "a>b"), ("deepseek_v4", 'a"b'), ("gemma4", "a:b")]
)
def test_a_required_argument_whose_name_cannot_be_written_is_refused_and_another_left_out(
    parser: str, name: str
) -> None:
    tokenizer = WalkTokenizer()
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "additionalProperties": False}
    for required in ([name], []):
        context = AnswerContext((ToolSpec("f", {**schema, "required": required}, strict=True),), parses_tools=True)
        form, demand = answer_format(parser), ToolsDemand("required", ("f",), parallel=False)
        if required:
            with pytest.raises(RequestError, match="cannot write"):
                form.grammar(tokenizer, context, message=FreeAnswer(), tools=demand)
        else:
            grammar = present(form.grammar(tokenizer, context, message=FreeAnswer(), tools=demand))
            answer = walk(tokenizer, compiled(tokenizer, grammar), seed=1)
            assert _only_call(read_answer(form.parser(tokenizer, context), answer.tokens)) == "{}"


def test_digits_and_word_characters_of_a_pattern_are_ascii() -> None:
    tokenizer = WalkTokenizer()
    for pattern, text in ((r"^\d$", "٣"), (r"^[\w-]$", "é"), (r"^\d$", "3"), (r"^[\w/-]$", "/")):
        grammar = present(answer_format().grammar(tokenizer, AnswerContext(), message=RegexAnswer(pattern[1:-1])))
        letters = tokenizer(text.encode())
        assert (LLMatcher(tokenizer.library, grammar).validate_tokens(letters) == len(letters)) is text.isascii()


def test_a_schema_that_allows_nothing_is_not_taken_for_one_that_allows_everything() -> None:
    grammar = answer_format().grammar(WalkTokenizer(), AnswerContext(), message=JsonAnswer(False))
    assert "Unsatisfiable" in LLMatcher.validate_grammar(present(grammar))
