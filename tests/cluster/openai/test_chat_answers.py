"""Chat completions of answers with reasoning and tool calls: messages, deltas, finish reasons, log-probabilities and usage."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.cluster.openai.published_document import check_published
from tests.cluster.openai.scripted_answer import ScriptedParser, ScriptedTokenizer, Step, events_of, request_of
from transom_cluster.openai.answer import response_types
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.json_pieces import json_pieces
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_core.contract import FinishReason
from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    MessageText,
    ReasoningText,
)

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
        AnswerReader(ScriptedTokenizer(steps), request.params, ScriptedParser(steps, at_end), **answer)  # type: ignore[arg-type]
        for steps, request in zip(scripts, requests, strict=True)
    ]
    return ChatWriter(
        ResponseMetadata(id="chatcmpl-1", model="m", created_s=1),
        requests,
        ScriptedTokenizer(scripts[0]),  # type: ignore[arg-type]
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


def deltas(chunks: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["delta"] for choice in choices]


def joined_message(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a client puts together from a choice's deltas."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas(chunks, index):
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = value if message.get(name) is None else message[name] + (value or "")
                continue
            (piece,) = value
            if "id" in piece:
                assert piece["index"] == len(calls)
                calls.append({k: v for k, v in piece.items() if k != "index"} | {"function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {})


def test_a_whole_message() -> None:
    answer = whole(writer_of(ALL), ALL)
    (choice,) = answer["choices"]
    message = choice["message"]
    ids = [one.pop("id") for one in message["tool_calls"]]
    assert all(re.fullmatch("call_[0-9a-f]{24}", id_) for id_ in ids)
    assert len(set(ids)) == 2
    assert message == {
        "role": "assistant",
        "content": "Let me look.",
        "refusal": None,
        "reasoning_content": "Rain?",
        "reasoning": "Rain?",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
            {"type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(ALL)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("per_event", [1, 2, 3, 5, 100])
def test_deltas_joined_are_the_whole_message(per_event: int) -> None:
    chunks = stream(writer_of(ALL), ALL, per_event=per_event)
    expected = whole(writer_of(ALL), ALL)
    assert joined_message(chunks) == expected["choices"][0]["message"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None, "refusal": None}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "tool_calls"
    ]
    assert chunks[-1]["usage"] == expected["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_pieces_of_one_kind_in_one_event_make_one_delta() -> None:
    got = deltas(stream(writer_of(ALL), ALL, per_event=100))
    kinds = [next(iter(delta), None) for delta in got]
    assert kinds == ["role", "reasoning_content", "content", *["tool_calls"] * 4, None]


def test_ids_differ_between_calls_choices_and_responses() -> None:
    writer = writer_of(ALL, ALL)
    answer = whole(writer, ALL, ALL)
    ids = [one["id"] for choice in answer["choices"] for one in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    chunks = stream(writer_of(ALL, ALL), ALL, ALL)
    assert [one["id"] for index in (0, 1) for one in joined_message(chunks, index)["tool_calls"]] == ids


@pytest.mark.parametrize(
    ("steps", "reason", "expected"),
    [
        (TALKING, "stop", "stop"),
        (WEATHER, "stop", "tool_calls"),
        (WEATHER, "length", "length"),
        (call(0, "f", "{", is_complete=False), "length", "length"),
        (call(0, "f", "{", is_complete=False), "stop", "stop"),
        ((*WEATHER, *call(1, "f", "{", is_complete=False)), "stop", "tool_calls"),
    ],
)
def test_finish_reasons(steps: Sequence[Step], reason: FinishReason, expected: str) -> None:
    assert whole(writer_of(steps), steps, reason=reason)["choices"][0]["finish_reason"] == expected
    chunks = stream(writer_of(steps), steps, reason=reason)
    assert chunks[-2]["choices"][0]["finish_reason"] == expected


def test_an_answer_that_ends_inside_a_call_shows_what_there_is() -> None:
    steps = WEATHER[:3]
    end = (CallEnd(0, is_complete=False),)
    message = whole(writer_of(steps, at_end=end), steps, reason="length")["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": '}
    assert joined_message(stream(writer_of(steps, at_end=end), steps, reason="length")) == message


def test_reasoning_is_left_out_on_request() -> None:
    answer = whole(writer_of(ALL, include_reasoning=False), ALL)
    assert not {"reasoning", "reasoning_content"} & set(answer["choices"][0]["message"])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    chunks = stream(writer_of(ALL, include_reasoning=False), ALL)
    assert joined_message(chunks) == answer["choices"][0]["message"]
    assert "Rain" not in json.dumps(chunks)


def test_only_the_first_call_where_calls_may_not_be_parallel() -> None:
    answer = whole(writer_of(ALL, parallel_tool_calls=False), ALL)
    message = answer["choices"][0]["message"]
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["get_weather"]
    assert joined_message(stream(writer_of(ALL, parallel_tool_calls=False), ALL)) == message


def test_malformed_markup_is_text_and_counted() -> None:
    steps = (Step("<call>oops", (MalformedMarkup("<call>oops"), MessageText("<call>oops"))),)
    writer = writer_of(steps)
    answer = whole(writer, steps)
    assert answer["choices"][0]["message"]["content"] == "<call>oops"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert writer.readers[0].tally.num_malformed == 1


def entries(chunks: Sequence[dict[str, Any]]) -> list[str]:
    """The tokens whose log-probabilities a stream has."""
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    return [entry["token"] for one in logprobs for entry in one["content"]]


@pytest.mark.parametrize("include_reasoning", [True, False])
@pytest.mark.parametrize("per_event", [1, 3, 100])
def test_every_token_but_of_hidden_reasoning_has_its_logprobs_once(per_event: int, include_reasoning: bool) -> None:
    tokens = [step.text for step in ALL if include_reasoning or step.text not in ("Rain", "?")]
    plain: dict[str, Any] = {"include_reasoning": include_reasoning}
    options: dict[str, Any] = {"per_event": per_event, "logprobs": True}
    chunks = stream(writer_of(ALL, num_top_logprobs=0, **plain), ALL, **options)
    assert entries(chunks) == tokens
    assert joined_message(chunks) == whole(writer_of(ALL, **plain), ALL)["choices"][0]["message"]
    answer = whole(writer_of(ALL, num_top_logprobs=0, **plain), ALL, **options)
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == tokens


SCRIPTS = {
    "text": TALKING,
    "reasoning alone": THINKING,
    "a call alone": WEATHER,
    "everything": ALL,
    "a call without its end": call(0, "f", "{", is_complete=False),
}


@pytest.mark.parametrize("num_top", [None, 0], ids=["", "logprobs"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_objects_and_chunks_are_the_published_ones(script: str, num_top: int | None) -> None:
    """Fields that the published document does not have (`reasoning_content`) are allowed there."""
    steps = SCRIPTS[script]
    answer = whole(writer_of(steps, steps, num_top_logprobs=num_top), steps, steps, logprobs=num_top is not None)
    check_published("CreateChatCompletionResponse", answer)
    TypeAdapter(response_types.ChatCompletion).validate_python(answer, strict=True)  # what /openapi.json says of it
    for per_event in (1, 3):
        writer = writer_of(steps, steps, num_top_logprobs=num_top)
        for chunk in stream(writer, steps, steps, per_event=per_event, logprobs=num_top is not None):
            check_published("CreateChatCompletionStreamResponse", chunk)
