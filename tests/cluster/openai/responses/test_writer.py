"""What /v1/responses sends for the parts of an answer: events in order, checked against OpenAI's document and client."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.cluster.openai.published_document import check_event, check_published
from tests.cluster.stub_worker import ByteTokenizer
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.error_responses import wire_error
from transom_cluster.openai.answer.json_pieces import json_pieces
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_cluster.openai.request.body import BodyParser
from transom_cluster.openai.responses.output_items import ItemOptions
from transom_cluster.openai.responses.request_body import RESPONSES_RULES, ResponsesRequest
from transom_cluster.openai.responses.request_echo import request_echo
from transom_cluster.openai.responses.responses_tools import ToolName, ToolNames
from transom_cluster.openai.responses.responses_writer import ResponsesWriter
from transom_core.contract import Logprob, OutputEvent, Request, SamplingParams, TokenLogprobs, Usage
from transom_core.errors import RequestTimeout
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, CallEnd, MessageText, ReasoningText

PARSER = BodyParser(ResponsesRequest, RESPONSES_RULES)
CLIENT_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
ANSWER: list[AnswerPart] = [
    ReasoningText("The user"), ReasoningText(" adds."),
    MessageText("Let me \u2028 see."),
    CallBegin(0, "add"), CallArguments(0, '{"a":'), CallArguments(0, " 1}"), CallEnd(0, True),
    CallBegin(1, "shell__run"), CallArguments(1, "{}"), CallEnd(1, True),
    CallBegin(2, "patch"), CallArguments(2, '{"input": "a\\n'), CallArguments(2, 'b"}'), CallEnd(2, True),
    MessageText("Done"), MessageText("."),
]  # fmt: skip


class ScriptedReader(AnswerReader):
    """Gives one part of the answer for each event, and the rest with the last one."""

    def __init__(self, parts: Sequence[AnswerPart]) -> None:
        super().__init__(ByteTokenizer(), SamplingParams(), None)  # type: ignore[arg-type]
        self._parts = iter(parts)
        self.num_reasoning_tokens = 2

    def is_message(self, position: int) -> bool:
        return True

    def _known_parts(self, event: OutputEvent) -> list[AnswerPart]:
        self.num_read += len(event.token_ids)
        return list(self._parts if event.finish_reason else itertools.islice(self._parts, 1))


def make_writer(parts: Sequence[AnswerPart], *, num_top: int | None = None, **body: Any) -> ResponsesWriter:
    request = PARSER.parse(json.dumps({"input": "hi", **body}).encode())
    names = ToolNames()
    for tool in (ToolName(name="add"), ToolName(name="run", namespace="shell"), ToolName(name="patch", kind="custom")):
        names.add(tool)
    options = ItemOptions(
        response_id="resp_abc",
        names=names,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        num_top_logprobs=num_top,
        includes_encrypted_reasoning=request.includes_encrypted_reasoning,
    )
    requests = [Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(), seed=0)]
    echo = request_echo(request, SamplingParams())
    metadata = ResponseMetadata(id="resp_abc", model="m", created_s=7)
    return ResponsesWriter(metadata, requests, ScriptedReader(parts), options, echo)


def events_of(parts: Sequence[AnswerPart], reason: Any = "stop", **event: Any) -> list[OutputEvent]:
    event["usage"] = Usage(num_prompt_tokens=3, num_output_tokens=len(parts), num_cached_tokens=2)
    reasons = [None] * len(parts) + [reason]
    return [
        OutputEvent(request_id="r", position=at, token_ids=(97,), finish_reason=one, **event)
        for at, one in enumerate(reasons)
    ]


def sent_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is checked."""
    assert text.isascii()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check_event(event)
        CLIENT_EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def stream(writer: ResponsesWriter, events: Sequence[OutputEvent]) -> list[dict[str, Any]]:
    text = ""
    for event in events:
        writer.usage.add(0, event)
        text += "".join(writer.chunks(0, event))
    return sent_events(text + "".join(writer.stream_end()))


def body_of(writer: ResponsesWriter, events: Sequence[OutputEvent]) -> dict[str, Any]:
    for event in events:
        writer.usage.add(0, event)
        writer.add(0, event)
    body = json.loads("".join(json_pieces(writer.body())))
    check_published("Response", body)
    Response.model_validate(body, strict=False)
    return body


def text_events(kind: str, num_deltas: int = 2) -> list[str]:
    begin, deltas = ["output_item.added", "content_part.added"], [f"{kind}.delta"] * num_deltas
    end = [f"{kind}.done", "content_part.done", "output_item.done"]
    return [f"response.{name}" for name in (*begin, *deltas, *end)]


def call_events(kind: str, num_deltas: int) -> list[str]:
    deltas = [f"response.{kind}.delta"] * num_deltas
    return ["response.output_item.added", *deltas, f"response.{kind}.done", "response.output_item.done"]


def test_the_events_of_reasoning_messages_and_calls():
    events = stream(make_writer(ANSWER), events_of(ANSWER))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        *text_events("reasoning_text"),
        *text_events("output_text", 1),
        *call_events("function_call_arguments", 2),
        *call_events("function_call_arguments", 1),
        *call_events("custom_tool_call_input", 2),
        *text_events("output_text"),
        "response.completed",
    ]
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == list(range(6))
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert "usage" not in events[0]["response"]


def test_stream_and_body_have_the_same_items():
    events = stream(make_writer(ANSWER), events_of(ANSWER))
    final, body = events[-1]["response"], body_of(make_writer(ANSWER), events_of(ANSWER))
    assert {**final, "completed_at": 0} == {**body, "completed_at": 0}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == body["output"]
    assert len({item["id"] for item in done}) == len(done)
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    kinds = [item["type"] for item in done]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "custom_tool_call", "message"]
    assert {item["status"] for item in done} == {"completed"}
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "The user adds."}]
    assert done[1]["content"][0]["text"] == "Let me \u2028 see."
    assert (done[2]["name"], done[2]["arguments"]) == ("add", '{"a": 1}')
    assert (done[3]["namespace"], done[3]["name"], done[3]["arguments"]) == ("shell", "run", "{}")
    assert (done[4]["name"], done[4]["input"]) == ("patch", "a\nb")
    assert len({item["call_id"] for item in done[2:5]}) == 3


def test_usage_and_the_fields_of_the_request():
    body = body_of(
        make_writer(
            ANSWER,
            instructions="Be brief.",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "add"},
            parallel_tool_calls=False,
            reasoning={"effort": "low", "summary": "auto"},
            text={"verbosity": "low", "format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
            max_output_tokens=50,
            metadata={"a": "b"},
            prompt_cache_key="k",
            user="u",
        ),
        events_of(ANSWER),
    )
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": len(ANSWER) + 1,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": len(ANSWER) + 4,
    }
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert (body["store"], body["parallel_tool_calls"]) == (False, False)
    assert (body["tools"], body["tool_choice"]) == ([TOOL], {"type": "function", "name": "add"})
    assert (body["reasoning"], body["text"]["format"]["name"]) == ({"effort": "low", "summary": "auto"}, "s")
    assert (body["instructions"], body["max_output_tokens"], body["metadata"]) == ("Be brief.", 50, {"a": "b"})
    assert (body["prompt_cache_key"], body["user"]) == ("k", "u")


def test_an_answer_that_reaches_its_greatest_length_is_incomplete():
    parts: list[AnswerPart] = [CallBegin(0, "add"), CallArguments(0, '{"a'), CallEnd(0, False)]
    events = stream(make_writer(parts), events_of(parts, "length"))
    final = events[-1]["response"]
    assert (events[-1]["type"], final["status"]) == ("response.incomplete", "incomplete")
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete"
    message = body_of(make_writer([MessageText("a")]), events_of([MessageText("a")], "length"))["output"][0]
    assert message["status"] == "incomplete"


def test_an_answer_without_a_part_is_an_empty_message():
    events = stream(make_writer([]), events_of([]))
    assert [event["type"] for event in events[2:]] == [*text_events("output_text", 0), "response.completed"]
    (item,) = events[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_a_stream_that_fails_ends_with_what_was_sent():
    writer = make_writer(ANSWER)
    text = "".join(piece for event in events_of(ANSWER)[:3] for piece in writer.chunks(0, event))
    text += "".join(writer.stream_error(wire_error(RequestTimeout("Too late."))))
    events = sent_events(text)
    failed = events[-1]["response"]
    assert (events[-1]["type"], failed["status"]) == ("response.failed", "failed")
    assert failed["error"] == {"code": "server_error", "message": "Too late."}
    assert [item["type"] for item in failed["output"]] == ["reasoning", "message"]


def test_encrypted_content_is_there_if_it_is_asked_for():
    parts: list[AnswerPart] = [ReasoningText("Hm.")]
    (plain,) = body_of(make_writer(parts), events_of(parts))["output"]
    assert "encrypted_content" not in plain
    (item,) = body_of(make_writer(parts, include=["reasoning.encrypted_content"]), events_of(parts))["output"]
    assert item["encrypted_content"].startswith("transom.1.")


@pytest.mark.parametrize("num_top", [0, 1])
def test_log_probabilities_are_those_of_the_message(num_top):
    token = Logprob(token_id=97, logprob=-0.5, rank=1)
    logprobs = (TokenLogprobs(chosen=token, top=(token,) * num_top),)
    parts: list[AnswerPart] = [MessageText("a"), MessageText("a")]
    writer = make_writer(parts, num_top=num_top, include=["message.output_text.logprobs"])
    events = stream(writer, events_of(parts, logprobs=logprobs))
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    expected = {**entry, "top_logprobs": [entry] * num_top}
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[expected], [expected]]
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["logprobs"] == [expected] * 2
