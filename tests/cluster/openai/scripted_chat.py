"""Scripted answers written as chat completions: the scripts, and their whole and streamed forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.cluster.openai.scripted_answer import ScriptedParser, ScriptedTokenizer, Step, events_of, request_of
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_answer import ChatAnswer
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.json_pieces import json_pieces
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, CallEnd, MessageText, ReasoningText

THINKING = (
    Step("<think>", state="reasoning"),
    Step("Rain", (ReasoningText("Rain"),), "reasoning"),
    Step("?", (ReasoningText("?"),), "reasoning"),
    Step("</think>"),
)
TALKING = (Step("Let me", (MessageText("Let me"),)), Step(" look.", (MessageText(" look."),)))


def call(index: int, name: str, *pieces: str, is_complete: bool = True) -> tuple[Step, ...]:
    return (
        Step("<call>", state="tool_call"),
        Step(name, (CallBegin(index, name),), "tool_call"),
        *(Step(piece, (CallArguments(index, piece),), "tool_call") for piece in pieces),
        Step("</call>", (CallEnd(index, is_complete),)),
    )


WEATHER = call(0, "get_weather", '{"city": ', '"Par', 'is"}')
TIME = call(1, "get_time", "{", "}")
ALL = (*THINKING, *TALKING, *WEATHER, *TIME)


def writer_of(
    *scripts: Sequence[Step], at_end: tuple[AnswerPart, ...] = (), num_top_logprobs: int | None = None, **answer: bool
) -> ChatWriter:
    requests = [request_of(choice) for choice in range(len(scripts))]
    answers = [
        ChatAnswer(
            AnswerReader(ScriptedTokenizer(steps), request.params, ScriptedParser(steps, at_end)),  # type: ignore[arg-type]
            **answer,
        )
        for steps, request in zip(scripts, requests, strict=True)
    ]
    return ChatWriter(
        ResponseMetadata(id="chatcmpl-1", model="m", created_s=1),
        requests,
        ScriptedTokenizer(scripts[0]),
        include_usage=True,
        num_top_logprobs=num_top_logprobs,
        answers=answers,
    )


def whole(writer: ChatWriter, *scripts: Sequence[Step], **events: Any) -> dict[str, Any]:
    for index, steps in enumerate(scripts):
        for event in events_of(steps, **events):
            writer.usage.add(index, event)
            writer.add(index, event)
    answer: dict[str, Any] = json.loads("".join(json_pieces(writer.body())))
    return answer


def stream(writer: ChatWriter, *scripts: Sequence[Step], **events: Any) -> list[dict[str, Any]]:
    text = ""
    for index, steps in enumerate(scripts):
        for event in events_of(steps, **events):
            writer.usage.add(index, event)
            text += "".join(writer.chunks(index, event))
    text += "".join(writer.stream_end())
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
