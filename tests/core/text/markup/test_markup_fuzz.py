"""Any text is read without an error, the same however it is cut, and no word of it is lost; the work grows with its length only.

Families that mark with tokens of their own are drawn from their own tokens; the others from the pieces of all families' text.
"""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.core.text.markup.canitoolcall_fixtures import FixtureTokenizer, all_text, random_chunks, read_answer
from tests.how_many import num_examples
from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.formats import REASONING_PARSERS, TOOL_PARSERS, answer_format
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, CallEnd
from transom_core.text.markup.reader import MarkupReader


def _split(text: str) -> tuple[str, ...]:
    """The pieces of a text, which spaces separate; ~ stands for a space inside a piece."""
    return tuple(piece.replace("~", " ") for piece in text.split())


# Pieces of all families' markup. Quoted keys that a call's reader leaves out do not occur, or words in them would be lost.
_PIECES = (
    *_split("<tool_call> </tool_call> <think> </think> [THINK] [/THINK] <tool </ <"),
    *_split("""{"name":~"f",~"arguments":~{"a":~" {"name":~" ",~"arguments":~ {"a":~ "}} }} } { [ ] null,~"""),
    *_split(r"[TOOL_CALLS] [ARGS] [CALL_ID] [TOOL_CALLS]~[ f[ARGS]{ [TOOL_ \ \u00 12. true"),
    *_split("""<|python_tag|> ;~ {"name":~"f",~"parameters":~{ <|python_start|> <|python_end|> [f( a=' ') )] ="""),
    *_split("<function=f> <parameter=a> </parameter> </function> é💧 <seed:tool_call> </seed:tool_call> </seed:think>"),
    *_split(
        """<minimax:tool_call> </minimax:tool_call> <invoke~name="f"> <parameter~name="a"> </invoke> <TOOLCALL>["""
    ),
    *_split("<|tool_call_start|>[ <|tool_call_end|> <function_calls> </function_calls> </TOOLCALL> g()"),
    *("\n", "\n\n", " ", "\t", "Here is my thought process:", "Here is my response:", "<|tool_call|>"),
)
_PARSERS: list[tuple[str | None, str | None]] = [
    *((name, "qwen3") for name in TOOL_PARSERS),
    *((None, name) for name in REASONING_PARSERS),
    ("mistral", "mistral"),
    ("hermes", "deepseek_r1"),
    (None, None),
]
_THINK = ("<think>", "</think>")
_SECTIONS = (
    *_split("<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"),
    *("function<｜tool▁sep｜>f\n```json\n", "f<｜tool▁sep｜>", "\n```", *_THINK),
)
_GLM = (
    *_split("<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <arg_key>a</arg_key> f"),
    *_THINK,
)
_DSML = (
    *_split("""｜DSML｜ <｜DSML｜tool_calls> </｜DSML｜tool_calls> <｜DSML｜invoke~name="f"> </｜DSML｜invoke>"""),
    *_split("""<｜DSML｜parameter~name="a"~string="true"> <｜DSML｜parameter~name="b"~string="false">"""),
    *_split("""</｜DSML｜parameter> <｜DSML｜~calls> <｜DSML｜~invoke~name="f">"""),
    *_THINK,
)
# The pieces of each family's own tokens: a marker is one token, all else is cut anywhere.
_OWN_PIECES = {
    "openai": (
        *_split("<|start|> <|channel|> <|constrain|> <|message|> <|end|> <|call|> <|return|> assistant analysis"),
        *_split("commentary final ~to=functions.f ~to=python ~json user <|end|><|start|>assistant"),
    ),
    "gemma4": (*_split("""<|tool_call> <tool_call|> <|"|> call:f{ call: a: , [ <|channel>thought <channel|>"""), "\n"),
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": (
        *_split("<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|>"),
        *_split("<|tool_call_argument_begin|> functions.f:0"),
        *("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", *_THINK),
    ),
    "deepseek_v3": _SECTIONS,
    "deepseek_v31": _SECTIONS,
    "deepseek_v4": _DSML,
    "deepseek_v41": _DSML,
}
_REASONING = {"openai": "openai_gptoss", "glm47": "glm45", "deepseek_v31": "deepseek_v3"}
_JSON_PIECES = ("{", '"a": ', '"', '\\"', "}", "[", "]", "3", "null", "<", ">", " ", "\n", "\\")
_TOOLS = (ToolSpec("f", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}),)
_CONTEXT = AnswerContext(_TOOLS, parses_tools=True, parses_reasoning=True)


def _read(form: AnswerFormat, chunks: Sequence[str]) -> list[AnswerPart]:
    return read_answer(form.parser(FixtureTokenizer(()), _CONTEXT), [(1, chunk) for chunk in chunks])


def _read_own(parser: str, pieces: Sequence[str], *, by_character: bool) -> list[AnswerPart]:
    """The parts of the answer that `pieces` are, with markers as tokens and the rest in pieces or cut by characters."""
    markers = [piece for piece in _OWN_PIECES[parser] if re.fullmatch(r"<[^<>]*>|｜\w*｜", piece)]
    tokenizer = FixtureTokenizer(markers)
    tokens = []
    for piece in pieces:
        for token in tokenizer.cut(piece, shows_special=False):
            cuts = by_character and not tokenizer.is_special(token[0])
            tokens += [(token[0], character) for character in token[1]] if cuts else [token]
    return read_answer(answer_format(parser, _REASONING.get(parser, parser)).parser(tokenizer, _CONTEXT), tokens)


def _with_words(pieces: Sequence[str | None]) -> tuple[list[str], list[str]]:
    """The pieces with a word in the place of each None, and these words."""
    words = [f"w{number}w" for number, piece in enumerate(pieces) if piece is None]
    return [f" w{number}w " if piece is None else piece for number, piece in enumerate(pieces)], words


def _check(parts: list[AnswerPart], words: list[str]) -> None:
    """Every word is shown, and every call that begins ends; the arguments of a complete call are an object."""
    shown = all_text(parts)
    assert [word for word in words if word not in shown] == []
    begun = [part.index for part in parts if isinstance(part, CallBegin)]
    assert begun == list(range(len(begun)))
    assert [part.index for part in parts if isinstance(part, CallEnd)] == begun
    assert {part.index for part in parts if isinstance(part, CallArguments)} <= set(begun)
    for part in parts:
        if isinstance(part, CallEnd) and part.is_complete:
            arguments = "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == part.index)
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("parsers", _PARSERS, ids=lambda parsers: "-".join(map(str, parsers)))
@settings(max_examples=num_examples(25, 4000), deadline=None)
@given(
    pieces=st.lists(st.one_of(st.sampled_from(_PIECES), st.none()), max_size=30),
    noise=st.lists(st.text(max_size=6), max_size=3),
    seed=st.integers(0, 99),
)
@example(pieces=["<think>", None, "</think>", "<think>", None], noise=[], seed=0)
@example(pieces=[], noise=["<tool_call><function=f>", '<parameter=b>{"a": 1}x', "<function=f>", "</tool_call>"], seed=0)
def test_any_text_is_read_the_same_however_it_is_cut(
    parsers: tuple[str | None, str | None], pieces: list[str | None], noise: list[str], seed: int
) -> None:
    form = answer_format(*parsers)
    filled, words = _with_words(pieces)
    for text, expected in (("".join(filled) + " .", words), ("".join([*noise, *filled]), [])):
        whole = _read(form, [text])
        assert _read(form, list(text)) == whole
        assert _read(form, random_chunks(text, seed=seed)) == whole
        _check(whole, expected)


@pytest.mark.parametrize("parser", _OWN_PIECES)
@settings(max_examples=num_examples(25, 2000), deadline=None)
@given(data=st.data())
def test_tokens_in_any_order_are_read(parser: str, data: st.DataObject) -> None:
    own = _OWN_PIECES[parser]
    drawn = data.draw(st.lists(st.sampled_from((*own, *own, *_JSON_PIECES, None, None, None)), max_size=40))
    pieces, words = _with_words(drawn)
    parts = _read_own(parser, pieces, by_character=False)
    assert _read_own(parser, pieces, by_character=True) == parts
    _check(parts, words)


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
