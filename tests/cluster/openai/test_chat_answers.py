"""Chat completions of answers with reasoning and tool calls: messages, deltas, finish reasons, log-probabilities and usage."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.cluster.conftest import stream_events
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
        include_usage="last",
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
    return stream_events(text)


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


def test_pieces_of_one_kind_in_one_event_make_one_delta() -> None:
    got = deltas(stream(writer_of(ALL), ALL, per_event=100))
    kinds = [next(iter(delta), None) for delta in got]
    assert kinds == ["role", "reasoning_content", "content", *["tool_calls"] * 4, None]


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


@dataclass
class Case:
    """An answer, how it is shown, and what its first choice has to have: the texts of reasoning and message, and its calls."""

    steps: Sequence[Step]
    shown: tuple[str, str | None, list[tuple[str, str]]]
    options: dict[str, bool] = field(default_factory=dict)
    at_end: tuple[AnswerPart, ...] = ()
    reason: FinishReason = "stop"
    finish_reason: str = "stop"


CALLS = [("get_weather", '{"city": "Paris"}'), ("get_time", "{}")]
MALFORMED = (Step("<call>oops", (MalformedMarkup("<call>oops"), MessageText("<call>oops"))),)
CASES = {
    "text": Case(TALKING, ("", "Let me look.", [])),
    "malformed markup": Case(MALFORMED, ("", "<call>oops", [])),
    "reasoning alone": Case(THINKING, ("Rain?", "", [])),
    "a call alone": Case(WEATHER, ("", None, CALLS[:1]), finish_reason="tool_calls"),
    "everything": Case(ALL, ("Rain?", "Let me look.", CALLS), finish_reason="tool_calls"),
    "a call and its end, at the greatest length": Case(
        WEATHER, ("", None, CALLS[:1]), reason="length", finish_reason="length"
    ),
    "a call without its end": Case(call(0, "f", "{", is_complete=False), ("", None, [("f", "{")])),
    "a whole call and one without its end": Case(
        (*WEATHER, *call(1, "f", "{", is_complete=False)),
        ("", None, [CALLS[0], ("f", "{")]),
        finish_reason="tool_calls",
    ),
    "an end inside of a call": Case(
        WEATHER[:3],
        ("", None, [("get_weather", '{"city": ')]),
        at_end=(CallEnd(0, is_complete=False),),
        reason="length",
        finish_reason="length",
    ),
    "no reasoning": Case(
        ALL, ("", "Let me look.", CALLS), options={"include_reasoning": False}, finish_reason="tool_calls"
    ),
    "no parallel calls": Case(
        ALL, ("Rain?", "Let me look.", CALLS[:1]), options={"parallel_tool_calls": False}, finish_reason="tool_calls"
    ),
}


@pytest.mark.parametrize("num_top", [None, 0], ids=["", "logprobs"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stream_joined_is_the_whole_answer_and_both_are_the_published_ones(case: Case, num_top: int | None) -> None:
    """Fields that the published document does not have (`reasoning_content`) are allowed there."""
    scripts, events = (case.steps, case.steps), {"reason": case.reason, "logprobs": num_top is not None}

    def writer() -> ChatWriter:
        return writer_of(*scripts, at_end=case.at_end, num_top_logprobs=num_top, **case.options)

    answer = whole(writer(), *scripts, **events)
    check_published("CreateChatCompletionResponse", answer)
    TypeAdapter(response_types.ChatCompletion).validate_python(answer, strict=True)  # what /openapi.json says of it
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    assert (message.get("reasoning", ""), message["content"], calls) == case.shown
    assert message.get("reasoning") == message.get("reasoning_content")
    ids = [one["id"] for choice in answer["choices"] for one in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)
    assert choice["finish_reason"] == case.finish_reason
    num_reasoning = 2 * (THINKING[1] in case.steps)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * num_reasoning}  # hidden ones, too
    for per_event in (1, 2, 3, 100):
        chunks = stream(writer(), *scripts, per_event=per_event, **events)
        for chunk in chunks:
            check_published("CreateChatCompletionStreamResponse", chunk)
        for one in answer["choices"]:  # an answer without content has null in the first delta, and "" as a whole
            expected = {**one["message"], "content": one["message"]["content"] or None}
            assert joined_message(chunks, one["index"]) == expected
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None, "refusal": None}
        reasons = [one["finish_reason"] for chunk in chunks for one in chunk["choices"] if one["index"] == 0]
        assert reasons == [None] * (len(reasons) - 1) + [case.finish_reason]
        assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [answer["usage"]]
