"""Tokens of one family's markup in any order are read without an error, alike however they are cut, and no word is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.text.markup.answer_texts import all_text
from tests.core.text.markup.canitoolcall_fixtures import FixtureTokenizer, read_answer
from tests.how_many import num_examples
from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.formats import answer_format
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, CallEnd
from transom_core.text.markup.token_markers import TokenMarkers

THINK = ("<think>", "</think>")
SECTIONS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("function<｜tool▁sep｜>f\n```json\n", "f<｜tool▁sep｜>", "\n```", *THINK),
)
GLM = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<arg_key>a</arg_key>",
    "f",
    *THINK,
)
# The pieces of each family's markup: a marker is one token, all else is cut anywhere.
PIECES = {
    "openai": (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        *(
            "assistant",
            "analysis",
            "commentary",
            "final",
            " to=functions.f",
            " to=python",
            " json",
            "user",
            "<|end|><|start|>assistant",
        ),
    ),
    "gemma4": (
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "call:f{",
        "call:",
        "a:",
        ",",
        "[",
        "<|channel>thought",
        "<channel|>",
        "\n",
    ),
    "glm45": GLM,
    "glm47": GLM,
    "kimi_k2": (
        *(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
        ),
        *("<|tool_call_end|>", "functions.f:0", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", *THINK),
    ),
    "kimi_k3": (
        *(
            "<|open|>",
            "<|close|>",
            "<|sep|>",
            "<|end_of_msg|>",
            "<|open|>tools<|sep|>",
            '<|open|>call tool="f" index="1"<|sep|>',
        ),
        *(
            '<|open|>argument key="a" type="string"<|sep|>',
            '<|open|>argument key="b" type="number"<|sep|>',
            "think<|sep|>",
        ),
        *(
            "response<|sep|>",
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
            "<|close|>tools<|sep|>",
            "message<|sep|>",
        ),
    ),
    "deepseek_v3": SECTIONS,
    "deepseek_v31": SECTIONS,
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "deepseek_v41"),
        (
            *(
                "｜DSML｜",
                "<｜DSML｜tool_calls>",
                "</｜DSML｜tool_calls>",
                '<｜DSML｜invoke name="f">',
                "</｜DSML｜invoke>",
            ),
            *(
                '<｜DSML｜parameter name="a" string="true">',
                '<｜DSML｜parameter name="b" string="false">',
                "</｜DSML｜parameter>",
            ),
            *("<｜DSML｜ calls>", '<｜DSML｜ invoke name="f">', *THINK),
        ),
    ),
}
REASONING = {"openai": "openai_gptoss", "glm47": "glm45", "deepseek_v31": "deepseek_v3"}
_JSON_PIECES = ("{", '"a": ', '"', '\\"', "}", "[", "]", "3", "null", "<", ">", " ", "\n", "\\")
_TOOLS = (ToolSpec("f", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}),)
_CONTEXT = AnswerContext(_TOOLS, parses_tools=True, parses_reasoning=True)


def _read(parser: str, pieces: Sequence[str], *, styles: Sequence[bool]) -> list[list[AnswerPart]]:
    """The parts of the answer that `pieces` are, with markers as tokens and cut by pieces, and (`styles`) cut by characters."""
    form = answer_format(parser, REASONING.get(parser, parser))
    markers = [piece for piece in PIECES[parser] if re.fullmatch(r"<[^<>]*>|｜\w*｜", piece)]
    answers = []
    for by_character in styles:
        tokenizer = FixtureTokenizer(markers)
        tokens = []
        for piece in pieces:
            for token in tokenizer.cut(piece, shows_special=False):
                cuts = by_character and not tokenizer.is_special(token[0])
                tokens += [(token[0], character) for character in token[1]] if cuts else [token]
        answers.append(read_answer(form.parser(tokenizer, _CONTEXT), tokens))
    return answers


def _pieces(parser: str, *others: str | None) -> st.SearchStrategy[list[str | None]]:
    return st.lists(st.sampled_from((*PIECES[parser], *PIECES[parser], *_JSON_PIECES, *others)), max_size=40)


@pytest.mark.parametrize("parser", PIECES)
@settings(max_examples=num_examples(40, 2000), deadline=None)
@given(data=st.data())
def test_tokens_in_any_order_are_read(parser: str, data: st.DataObject) -> None:
    drawn = data.draw(_pieces(parser, None, None, None))
    words = [f"«{number}»" for number, piece in enumerate(drawn) if piece is None]
    pieces = [f" «{number}» " if piece is None else piece for number, piece in enumerate(drawn)]
    by_piece, by_character = _read(parser, pieces, styles=(False, True))
    assert by_piece == by_character
    shown = all_text(by_piece)
    assert [word for word in words if word not in shown] == []
    begun = [part.index for part in by_piece if isinstance(part, CallBegin)]
    assert begun == list(range(len(begun)))
    assert [part.index for part in by_piece if isinstance(part, CallEnd)] == begun
    for part in by_piece:
        if isinstance(part, CallEnd) and part.is_complete:
            arguments = "".join(p.text for p in by_piece if isinstance(p, CallArguments) and p.index == part.index)
            assert isinstance(json.loads(arguments), dict)


def test_marker_tokens_are_told_from_their_text() -> None:
    tokenizer = FixtureTokenizer(["<|end|>"])
    markers = TokenMarkers(tokenizer, ["<|end|>", "<|start|>"])
    (character,) = markers.by_id.values()
    assert (markers["<|end|>"], markers["<|start|>"]) == (character, "<|start|>")
    assert markers.spelled(markers.read_as("a<|end|><|start|>")) == "a<|end|><|start|>"
