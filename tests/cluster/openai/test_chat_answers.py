"""Chat completions of answers with reasoning and tool calls: messages, deltas, finish reasons, log-probabilities and usage.

vLLM's field `prompt_logprobs`, the log-probabilities of a prompt's tokens beside the answer; and responses with very many
log-probabilities: a stated bound, the prompt's computed once, JSON in pieces, memory in arrays.
"""

import contextlib
import json
import re
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.cluster.conftest import Api, running_api, stream_events
from tests.cluster.openai.published_document import check_published
from tests.cluster.openai.scripted_answer import ScriptedParser, ScriptedTokenizer, Step, events_of, request_of
from tests.cluster.stub_worker import ByteTokenizer, logprobs_of
from transom_cluster.openai.answer import json_pieces as pieces, response_types
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.completion_writer import CompletionWriter, EchoedPrompt
from transom_cluster.openai.answer.json_pieces import json_pieces
from transom_cluster.openai.answer.writers import ResponseMetadata, ResponseWriter
from transom_cluster.openai.request.request_limits import MAX_LOGPROB_ENTRIES, ModelLimits, check_logprob_budget
from transom_core.contract import FinishReason, LogprobTable, OutputEvent, SamplingParams
from transom_core.errors import RequestError
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
METADATA = ResponseMetadata(id="cmpl-x", model="m", created_s=0)
LONG = {"prompt": "a" * 400, "echo": True, "logprobs": 20, "max_tokens": 2}
MESSAGE_BYTES = 4 * pieces.PIECE_CHARS  # one message holds a piece, and what made it large enough


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
    return json.loads("".join(json_pieces(writer.body())))


def stream(writer: ChatWriter, *scripts: Sequence[Step], **events: Any) -> list[dict[str, Any]]:
    text = ""
    for index, steps in enumerate(scripts):
        for event in events_of(steps, **events):
            writer.usage.add(index, event)
            text += "".join(writer.chunks(index, event))
    return stream_events(text + "".join(writer.stream_end()))


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
    kinds = [next(iter(delta), None) for delta in deltas(stream(writer_of(ALL), ALL, per_event=100))]
    assert kinds == ["role", "reasoning_content", "content", *["tool_calls"] * 4, None]


@pytest.mark.parametrize("include_reasoning", [True, False])
@pytest.mark.parametrize("per_event", [1, 3, 100])
def test_every_token_but_of_hidden_reasoning_has_its_logprobs_once(per_event: int, include_reasoning: bool) -> None:
    tokens = [step.text for step in ALL if include_reasoning or step.text not in ("Rain", "?")]
    plain: dict[str, Any] = {"include_reasoning": include_reasoning}
    options: dict[str, Any] = {"per_event": per_event, "logprobs": True}
    chunks = stream(writer_of(ALL, num_top_logprobs=1, **plain), ALL, **options)
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    entries = [entry for one in logprobs for entry in one["content"]]
    assert [entry["token"] for entry in entries] == tokens
    assert joined_message(chunks) == whole(writer_of(ALL, **plain), ALL)["choices"][0]["message"]
    answer = whole(writer_of(ALL, num_top_logprobs=1, **plain), ALL, **options)
    assert answer["choices"][0]["logprobs"]["content"] == entries


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


@pytest.mark.parametrize("num_top", [None, 1], ids=["", "logprobs"])
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


@pytest.mark.parametrize(
    ("lengths", "params", "max_model_len", "is_refused"),
    [
        # 4,200,000 entries, and none of outputs
        ([1000] * 2, {"n": 100, "prompt_logprobs": 20, "max_tokens": 1}, 2000, True),
        ([1], {"n": 4, "logprobs": 20, "max_tokens": 50_000}, 60_000, True),  # a long answer in four choices
        ([1], {"n": 40, "logprobs": 0, "max_tokens": None}, 131_072, True),  # up to the model's length
        ([1000], {"n": 128, "logprobs": 20, "max_tokens": 16}, 2000, False),  # a prompt without echo does not count
        ([5], {"logprobs": 0, "max_tokens": None}, 10_000_000, False),  # one sequence of the model's length
    ],
)
def test_too_many_log_probabilities_are_refused_with_the_numbers(
    lengths: list[int], params: dict[str, Any], max_model_len: int, is_refused: bool
) -> None:
    limits = ModelLimits(max_model_len=max_model_len, vocab_size=1000)
    refusal = pytest.raises(RequestError, match=f"At most {MAX_LOGPROB_ENTRIES:,} are allowed")
    with refusal if is_refused else contextlib.nullcontext():
        check_logprob_budget(lengths, SamplingParams(**params), limits, param="logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_computes_the_prompt_for_all(stream: bool) -> None:
    """Every choice shows what a request for one choice shows; only the first asks the worker for it."""
    async with running_api() as api:
        alone = (await api.complete(**LONG)).json()["choices"][0]
        api.worker.submitted.clear()
        call = api.call("/v1/completions", {**LONG, "n": 8, "stream": stream})
        await call.ended()
        asked = {one.choice_index: one.params.prompt_logprobs for one in api.worker.submitted}
        assert asked == {0: 20, **dict.fromkeys(range(1, 8))}
    assert max(len(message.get("body", b"")) for message in call.sent) < MESSAGE_BYTES
    assert len(call.text) > 2 * MESSAGE_BYTES
    headers = dict(call.sent[0]["headers"])
    assert b"content-length" not in headers
    if not stream:
        assert headers[b"content-type"] == b"application/json"
        assert json.loads(call.text)["choices"] == [{**alone, "index": index} for index in range(8)]
        return
    for index in range(8):
        parts = [one for chunk in stream_events(call.text) for one in chunk["choices"] if one["index"] == index]
        assert "".join(part["text"] for part in parts) == alone["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
        shown = [part["logprobs"] for part in parts if part["logprobs"]]
        assert max(len(one["tokens"]) for one in shown) == pieces.VALUES_PER_PIECE
        assert {name: [v for one in shown for v in one[name]] for name in alone["logprobs"]} == alone["logprobs"]


def writers(num_tokens: int, n: int) -> list[ResponseWriter]:
    """Writers of plain responses that have all events: an echoed prompt with 20 alternatives, and a chat's long answers."""
    tokenizer: Any = ByteTokenizer()
    prompt = (97,) * num_tokens
    asked = [request_of(choice, prompt=prompt, logprobs=20, prompt_logprobs=20) for choice in range(n)]
    echoed = [EchoedPrompt(text="a" * num_tokens, token_ids=prompt)] * n
    completion = CompletionWriter(METADATA, asked, tokenizer, num_top_logprobs=20, echoed=echoed)
    table = LogprobTable.of(logprobs_of(97, 20) for _ in range(num_tokens - 1))
    chat = ChatWriter(METADATA, asked, tokenizer, num_top_logprobs=20)
    for index in range(n):
        end = OutputEvent(request_id="r", position=0, finish_reason="length", prompt_logprobs=None if index else table)
        completion.add(index, end)
        for position in range(num_tokens):
            chat.add(index, OutputEvent(request_id="r", position=position, text="a", logprobs=(logprobs_of(97, 20),)))
        chat.add(index, end)
    return [completion, chat]


def test_memory_while_a_response_is_kept_and_written() -> None:
    """An entry takes 12 bytes until it is sent; 42,000 of them take some 130 bytes each as objects, and more as JSON."""
    num_tokens, n = 250, 8
    num_entries = num_tokens * n * 21
    writers(num_tokens, 1)  # so that Python's lists of unused objects are full
    tracemalloc.start()
    try:
        made = writers(num_tokens, n)
        kept = tracemalloc.get_traced_memory()[0]
        assert kept < 1.5 * 12 * (num_entries + num_entries / n) + 200_000
        for writer, least_bytes in zip(made, (9, 40), strict=True):
            tracemalloc.reset_peak()
            sizes = [len(piece) for piece in pieces.joined_pieces(pieces.json_pieces(writer.body()))]
            written = tracemalloc.get_traced_memory()[1] - kept
            assert sum(sizes) > least_bytes * num_entries
            assert max(sizes) < MESSAGE_BYTES
            assert written < 8 * MESSAGE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_lazy_lists_are_written_as_lists(count: int) -> None:
    values = [{"é": [at, None], "x": f'"{at}"'} for at in range(count)]
    body = {"a": {"lazy": pieces.LazyList(lambda: values), "empty": {}}, "b": [{"c": [1.5, "ü"]}], "d": []}
    text = "".join(pieces.joined_pieces(pieces.json_pieces(body)))
    assert json.loads(text) == {"a": {"lazy": values, "empty": {}}, "b": [{"c": [1.5, "ü"]}], "d": []}
    assert " " not in text


PROMPT = "user:hi;assistant:"


def prompt_entries(text: str, num_top: int) -> list[Any]:
    """As the stub worker makes them: each token at rank 1, and its successors after it."""

    def entry(token: int) -> dict[str, Any]:
        ranks = range(max(num_top, 1))
        return {str(token + k): {"logprob": -0.5 - k, "rank": k + 1, "decoded_token": chr(token + k)} for k in ranks}

    return [None, *map(entry, text[1:].encode())]


async def test_a_chat_has_them_beside_its_choices(api: Api) -> None:
    for num_top in (0, 1, 2):
        answer = (await api.chat(prompt_logprobs=num_top, n=2)).json()
        assert (answer["prompt_logprobs"], len(answer["choices"])) == (prompt_entries(PROMPT, num_top), 2)
    assert "prompt_logprobs" not in (await api.chat()).json()


async def test_a_completion_has_them_in_each_choice(api: Api) -> None:
    answer = (await api.complete(prompt=["hi", "you", "h"], prompt_logprobs=1, n=2)).json()
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found == [prompt_entries("hi", 1)] * 2 + [prompt_entries("you", 1)] * 2 + [[None]] * 2
    assert "prompt_logprobs" not in (await api.complete()).json()["choices"][0]


async def test_an_echo_with_fewer_alternatives_does_not_have_more(api: Api) -> None:
    (choice,) = (await api.complete(prompt="hi", prompt_logprobs=2, echo=True, logprobs=1)).json()["choices"]
    assert choice["prompt_logprobs"] == prompt_entries("hi", 2)
    assert choice["logprobs"]["top_logprobs"][1] == {"i": -0.5}
