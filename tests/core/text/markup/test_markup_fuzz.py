"""Any text is read without an error, the same however it is cut, and no word of it is lost; the work grows with its length only."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.text.markup.answer_texts import all_text
from tests.core.text.markup.canitoolcall_fixtures import FixtureTokenizer, random_chunks, read_answer
from tests.how_many import num_examples
from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.formats import REASONING_PARSERS, TOOL_PARSERS, answer_format
from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    MessageText,
)
from transom_core.text.markup.reader import MarkupReader

# Pieces of all families' markup. Quoted keys that a call's reader leaves out do not occur, or words in them would be lost.
_PIECES = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "<tool", "</", "<"),
    *(
        '{"name": "f", "arguments": {"a": "',
        '{"name": "',
        '", "arguments": ',
        '{"a": ',
        '"}}',
        "}}",
        "}",
        "{",
        "[",
        "]",
        "null, ",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS] [", "f[ARGS]{", "[TOOL_", "\\", "\\u00", "12.", "true"),
    *(
        "<|python_tag|>",
        "; ",
        '{"name": "f", "parameters": {',
        "<|python_start|>",
        "<|python_end|>",
        "[f(",
        "a='",
        "')",
        ")]",
        "=",
    ),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "\n", "\n\n", " ", "\t", "é💧"),
    *("Here is my thought process:", "Here is my response:", "<|tool_call|>"),
)
_PARSERS: list[tuple[str | None, str | None]] = [
    *((name, "qwen3") for name in TOOL_PARSERS),
    *((None, name) for name in REASONING_PARSERS),
    ("mistral", "mistral"),
    ("hermes", "deepseek_r1"),
    (None, None),
]
_TOOLS = (ToolSpec("f", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}),)
_CONTEXT = AnswerContext(_TOOLS, parses_tools=True, parses_reasoning=True)


def _read(form: AnswerFormat, chunks: Sequence[str]) -> list[AnswerPart]:
    parser = form.parser(FixtureTokenizer(()), _CONTEXT)
    return read_answer(parser, [(1, chunk) for chunk in chunks])


@pytest.mark.parametrize("parsers", _PARSERS, ids=lambda parsers: "-".join(map(str, parsers)))
@settings(max_examples=num_examples(25, 2000), deadline=None)
@given(
    pieces=st.lists(st.one_of(st.sampled_from(_PIECES), st.text(max_size=6), st.none()), max_size=30),
    seed=st.integers(0, 99),
)
def test_any_text_is_read_the_same_however_it_is_cut(
    parsers: tuple[str | None, str | None], pieces: list[str | None], seed: int
) -> None:
    text = "".join(f" w{number} " if piece is None else piece for number, piece in enumerate(pieces))
    form = answer_format(*parsers)
    whole = _read(form, [text])
    assert _read(form, list(text)) == whole
    assert _read(form, random_chunks(text, seed=seed)) == whole


@pytest.mark.parametrize("parsers", _PARSERS, ids=lambda parsers: "-".join(map(str, parsers)))
@settings(max_examples=num_examples(25, 2000), deadline=None)
@given(pieces=st.lists(st.one_of(st.sampled_from(_PIECES), st.none()), max_size=30))
@example(pieces=["<think>", None, "</think>", "<think>", None])
def test_no_word_is_lost(parsers: tuple[str | None, str | None], pieces: list[str | None]) -> None:
    words = [f"w{number}" for number, piece in enumerate(pieces) if piece is None]
    text = "".join(f" w{number} " if piece is None else piece for number, piece in enumerate(pieces)) + " ."
    shown = all_text(_read(answer_format(*parsers), [text]))
    assert [word for word in words if not re.search(rf"\b{word}\b", shown)] == []


@pytest.mark.parametrize("parsers", _PARSERS, ids=lambda parsers: "-".join(map(str, parsers)))
@settings(max_examples=num_examples(20, 2000), deadline=None)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=30))
def test_every_call_that_begins_ends(parsers: tuple[str | None, str | None], pieces: list[str]) -> None:
    parts = _read(answer_format(*parsers), ["".join(pieces)])
    begun = [part.index for part in parts if isinstance(part, CallBegin)]
    assert begun == list(range(len(begun)))
    assert [part.index for part in parts if isinstance(part, CallEnd)] == begun
    for part in parts:
        if isinstance(part, CallArguments):
            assert part.index in begun


@settings(max_examples=num_examples(100, 3000), deadline=None)
@given(text=st.text())
def test_text_without_parsers_is_the_message(text: str) -> None:
    assert _read(answer_format(), [text]) == ([MessageText(text)] if text else [])


_ANSWERS = {
    "message": "no markup, " * 30_000,
    "spaces": " " * 300_000,
    "brackets": "<" * 300_000,
    "begun markers": "<tool_cal [TOOL_CALL <|python_ta " * 10_000,
    "reasoning": "<think>" + "hmm " * 80_000,
    "hermes arguments": '<tool_call>{"name": "f", "arguments": {"a": "' + "text \\n " * 40_000 + '"}}</tool_call>',
    "hermes without name": '<tool_call>{"arguments": {"a": [' + "1, " * 100_000,
    "hermes calls": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n' * 6_000,
    "hermes nesting": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 300_000,
    "llama answer": '{"name": ' + '"a' * 150_000,
    "mistral name": "[TOOL_CALLS]" + "n" * 300_000,
    "pythonic nesting": "[f(a=" + "[" * 300_000,
    "number": "[f(a=" + "1" * 300_000,
    "harmony header": "<|channel|>" + "commentary " * 30_000,
    "harmony arguments": '<|channel|>commentary to=functions.f<|message|>{"a": "' + "text <|en " * 30_000,
    "gemma string": '<|tool_call>call:f{a:<|"|>' + "text <| " * 40_000,
    "gemma nesting": "<|tool_call>call:f{a:" + "[" * 300_000,
    "gemma key": "<|tool_call>call:f{" + "key " * 80_000,
    "glm string": "<tool_call>f<arg_key>a</arg_key><arg_value>" + "text </tool_call> \n </arg_valu" * 10_000,
    "glm value": "<tool_call>f<arg_key>b</arg_key><arg_value>" + "1" * 300_000,
    "dsml string": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">'
    + "</｜DSML｜" * 30_000,
    "kimi section": "<|tool_calls_section_begin|>" + "noise " * 50_000,
    "parameters": "<tool_call>\n<function=f>\n<parameter=a>\n" + "line\n</parameter> \n" * 15_000,
}


@pytest.mark.parametrize("parsers", _PARSERS, ids=lambda parsers: "-".join(map(str, parsers)))
def test_no_character_is_read_often(parsers: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unread when the next characters come is copied; all these copies together stay within the answer's length."""
    waiting: list[int] = []
    feed = MarkupReader.feed

    def counting_feed(reader: MarkupReader, text: str) -> None:
        waiting.append(reader.num_waiting)
        feed(reader, text)

    monkeypatch.setattr(MarkupReader, "feed", counting_feed)
    for name, answer in _ANSWERS.items():
        answer = answer[: num_examples(1_500, 300_000)]
        waiting.clear()
        _read(answer_format(*parsers), [answer[at : at + 3] for at in range(0, len(answer), 3)])
        assert sum(waiting) < 7 * len(answer), name
