"""Recorded answers of real models, of all families, as chat completions: the deltas joined are the whole message.

The answers are canitoolcall's. test_canitoolcall.py checks what the parsers find in them; here they go the whole way from a
worker's output events, with one token or several in each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from canitoolcall.fixtures import Fixture

from tests.core.text.markup.canitoolcall_fixtures import (
    FixtureTokenizer,
    all_fixtures,
    families,
    fixture_context,
    parse_result,
    parsers_of,
    read_answer,
)
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_answer import ChatAnswer
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.json_pieces import json_pieces
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_cluster.router.output_events import joined
from transom_core.contract import OutputEvent, Request, SamplingParams
from transom_core.text.markup.formats import answer_format

FIXTURES = [fixture for fixture in all_fixtures() if parsers_of(fixture)]
REQUEST = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=None), seed=0)


class CutAnswer(FixtureTokenizer):
    """The tokenizer of one answer: its tokens have ids of their own, but for the family's markers, which are special."""

    def __init__(self, fixture: Fixture) -> None:
        super().__init__(families()[fixture.family].markers)
        self._own: dict[str, int] = {}
        self.tokens: list[tuple[int, str]] = []  # ids, and their texts in the answer
        for token_id, text in self.cut(fixture.raw_output, shows_special=False):
            own_id = token_id if self.is_special(token_id) else 100_000 + self._own.setdefault(text, len(self._own))
            self.tokens.append((own_id, text))
        self._words = {100_000 + i: text for text, i in self._own.items()}

    def token_bytes(self, token_id: int) -> bytes:
        return (self._words.get(token_id) or self.token(token_id)).encode()


def events_of(tokens: Sequence[tuple[int, str]], per_event: int) -> list[OutputEvent]:
    """A worker's events, which have ended."""
    singles, offset = [], 0
    for position, (token_id, text) in enumerate(tokens):
        is_last = position == len(tokens) - 1
        singles.append(
            OutputEvent(
                request_id="r",
                position=position,
                token_ids=(token_id,),
                text=text,
                text_offset=offset,
                finish_reason="stop" if is_last else None,
            )
        )
        offset += len(text)
    return [joined(singles[i : i + per_event]) for i in range(0, len(singles), per_event)]


def writer_of(fixture: Fixture, tokenizer: CutAnswer) -> ChatWriter:
    parsers = parsers_of(fixture)
    assert parsers is not None
    parser = answer_format(*parsers).parser(tokenizer, fixture_context(fixture))
    answer = ChatAnswer(AnswerReader(tokenizer, REQUEST.params, parser))  # type: ignore[arg-type]
    return ChatWriter(ResponseMetadata(id="i", model="m", created_s=1), [REQUEST], tokenizer, answers=[answer])


def whole_message(fixture: Fixture, tokenizer: CutAnswer, per_event: int) -> dict[str, Any]:
    writer = writer_of(fixture, tokenizer)
    for event in events_of(tokenizer.tokens, per_event):
        writer.add(0, event)
    (choice,) = json.loads("".join(json_pieces(writer.body())))["choices"]
    return {"finish_reason": choice["finish_reason"], **choice["message"]}


def streamed_message(fixture: Fixture, tokenizer: CutAnswer, per_event: int) -> dict[str, Any]:
    writer = writer_of(fixture, tokenizer)
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events_of(tokenizer.tokens, per_event):
        for chunk in writer.chunks(0, event):
            (choice,) = json.loads(chunk.removeprefix("data: "))["choices"]
            message["finish_reason"] = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = value if message.get(name) is None else message[name] + value
                elif "id" in value[0]:
                    calls.append({name: part for name, part in value[0].items() if name != "index"})
                else:
                    calls[value[0]["index"]]["function"]["arguments"] += value[0]["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("family", sorted({fixture.family for fixture in FIXTURES}))
def test_deltas_joined_are_the_whole_message(family: str) -> None:
    for fixture in (one for one in FIXTURES if one.family == family):
        tokenizer = CutAnswer(fixture)
        if not tokenizer.tokens:
            continue
        whole = whole_message(fixture, tokenizer, 1)
        for per_event in (1, 4):
            streamed = streamed_message(fixture, tokenizer, per_event)
            assert {**streamed, "content": streamed["content"] or None} == {
                **whole,
                "content": whole["content"] or None,
            }, fixture.id
        parsers = parsers_of(fixture)
        assert parsers is not None
        parser = answer_format(*parsers).parser(tokenizer, fixture_context(fixture))
        expected = parse_result(read_answer(parser, tokenizer.tokens))
        assert (whole["content"] or None) == expected.content, fixture.id
        assert whole.get("reasoning_content") == expected.reasoning_content, fixture.id
        names = [call["function"]["name"] for call in whole.get("tool_calls", ())]
        assert set(names) >= {call.name for call in expected.tool_calls}, (
            fixture.id
        )  # one that breaks off is shown, too
        assert (whole["finish_reason"] == "tool_calls") == bool(expected.tool_calls), fixture.id
