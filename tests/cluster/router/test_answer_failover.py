"""A worker dies in the middle of reasoning, of a tool call, of JSON: the client gets the message of a calm run, with the same ids.

Every cut position of every answer, with one token or several in an event, streamed and whole; the answers are scripts, so that the
test needs no model. tests/end_to_end has real engines and processes.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import pytest

from tests.cluster.conftest import running, stream_events, timings
from tests.cluster.speaking_worker import Fate, SpeakingWorker
from tests.cluster.stub_worker import VOCAB_SIZE, ByteTokenizer, StubDirectory
from tests.how_many import ALL_TESTS
from transom_cluster.http.client_limits import WorkLimits
from transom_cluster.http.generation_response import GenerationResponse
from transom_cluster.http.request_state import RequestState
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_writer import ChatWriter
from transom_cluster.openai.answer.writers import ResponseMetadata
from transom_cluster.router.router import Router
from transom_cluster.telemetry.request_events import RequestEvents
from transom_core.config import FailoverConfig, ServerConfig
from transom_core.contract import Request, SamplingParams
from transom_core.model_files.resolve import resolve_model
from transom_core.text.markup.answer_format import AnswerFormat
from transom_core.text.markup.context import AnswerContext, ToolSpec
from transom_core.text.markup.families import harmony
from transom_core.text.markup.formats import answer_format
from transom_core.text.tokenizer import Tokenizer

Markup = Literal["hermes", "harmony"]

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🦜", "note": "say \\"</tool_call>\\""}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
ANSWERS = {
    "reasoning, message and calls": f"<think>\nRain? 日本\n</think>\n\nLet me look.\n{WEATHER}\n{TIME}",
    "a JSON document": '{"name": "Zoë", "tags": ["a", "🦜"], "size": {"w": 1.5, "h": null}}',
    "malformed markup": '<think>Hm</think><tool_call>\n{"nome": 1}\n</tool_call> and on',
    "an end inside a call": WEATHER[:-30],
}
THOUGHT = "<|channel|>analysis<|message|>Rain? 日本<|end|><|start|>assistant<|channel|>"
HARMONY = {
    "a call": THOUGHT + 'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Zürich 🦜"}<|call|>',
    "a message": THOUGHT + "final<|message|>It rains 🦜.<|return|>",
}
CONTEXT = AnswerContext(tools=(ToolSpec("weather"), ToolSpec("time")), parses_tools=True, parses_reasoning=True)


class HarmonyTokenizer(ByteTokenizer):
    """One token a byte, and harmony's special tokens after them; two of these end an answer."""

    ids: ClassVar = {text: VOCAB_SIZE + i for i, text in enumerate(harmony.MARKERS)}
    eos_token_ids = (ids[harmony.RETURN], ids[harmony.CALL])
    vocab_size = VOCAB_SIZE + len(ids)

    def encode(self, text: str, *, add_special_tokens: bool = True, check_length: Any = None) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, self.ids))})", text)
        return [i for piece in pieces for i in ([self.ids[piece]] if piece in self.ids else piece.encode())]

    def token_bytes(self, token_id: int) -> bytes:
        return self.token(token_id).encode() if token_id >= VOCAB_SIZE else super().token_bytes(token_id)

    def token(self, token_id: int) -> str:
        return harmony.MARKERS[token_id - VOCAB_SIZE] if token_id >= VOCAB_SIZE else super().token(token_id)

    def marker_id(self, text: str) -> int | None:
        return self.ids.get(text)

    def is_special(self, token_id: int) -> bool:
        return token_id >= VOCAB_SIZE


@cache
def tokenizer_of(markup: Markup) -> Tokenizer:
    return HarmonyTokenizer() if markup == "harmony" else Tokenizer.load(resolve_model("smollm2"))  # type: ignore[return-value]


def format_of(markup: Markup) -> AnswerFormat:
    return answer_format("openai", "openai_gptoss") if markup == "harmony" else answer_format("hermes", "qwen3")


@dataclass(frozen=True)
class Case:
    """One request: the texts of its choices, and how it is asked."""

    texts: tuple[str, ...]
    markup: Markup = "hermes"
    stream: bool = False
    per_event: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int = 1000


@asynccontextmanager
async def routed(*workers: SpeakingWorker) -> AsyncIterator[Router]:
    router = Router(
        workers=StubDirectory(*workers),
        tokenizer=workers[0].tokenizer,  # type: ignore[arg-type]
        config=ServerConfig(served_model_name="m", routing_policy="round_robin", failover=FailoverConfig(wait_s=60.0)),
        router_id="r",
        timings=timings(),
    )
    async with running(router, len(workers)):
        yield router


async def answered(router: Router, case: Case) -> str:
    """The body of the response to a case's request."""
    params = SamplingParams(max_tokens=case.max_tokens, stop=case.stop, temperature=0.0)
    requests = [
        Request(request_id=f"chatcmpl-1-0-{i}", prompt_token_ids=(1, 2, 3), params=params, seed=1, choice_index=i)
        for i in range(len(case.texts))
    ]
    answers = [
        AnswerReader(router.tokenizer, params, format_of(case.markup).parser(router.tokenizer, CONTEXT))
        for _ in requests
    ]
    writer = ChatWriter(
        ResponseMetadata(id="chatcmpl-1", model="m", created_s=1),
        requests,
        router.tokenizer,
        include_usage=True,
        answers=answers,
    )
    response = GenerationResponse(
        router,
        requests,
        writer,
        state=RequestState(x_request_id="", trace=None),
        work=WorkLimits(router.config.limits),
        stream=case.stream,
        events=RequestEvents(),
    )
    body = b""

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")

    async def receive() -> Any:
        await asyncio.Event().wait()

    await response({"type": "http"}, receive, send)
    return body.decode()


CALM: dict[Case, str] = {}
"""The responses of runs in which no worker dies."""


async def calm_run(case: Case) -> str:
    if case not in CALM:
        CALM[case] = await run(case)
    return CALM[case]


async def run(case: Case, *deaths: int) -> str:
    """The response where one worker after the other dies, each after a number of tokens, and one stays."""
    fate = Fate(list(deaths))
    workers = [
        SpeakingWorker(
            tokenizer=tokenizer_of(case.markup), texts=case.texts, per_event=case.per_event, worker=f"w{i}", fate=fate
        )
        for i in range(len(deaths) + 1)
    ]
    async with routed(*workers) as router:
        body = await answered(router, case)
    assert fate.num_deaths == len(deaths) or case.stop  # a stop string may end the answer before
    return body


def joined_stream(body: str) -> dict[int, dict[str, Any]]:
    """By choice: what a client puts together from the deltas, with the bytes of arguments as they came."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream_events(body):
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"calls": [], "finish_reason": None})
            assert whole["finish_reason"] is None
            whole["finish_reason"] = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    whole[name] = value if whole.get(name) is None else whole[name] + (value or "")
                    continue
                for piece in value:
                    if "id" in piece:
                        assert piece["index"] == len(whole["calls"])
                        whole["calls"].append({**piece, "function": dict(piece["function"])})
                    else:
                        whole["calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return choices


def num_tokens(texts: Sequence[str], markup: Markup = "hermes") -> int:
    """Without those that end the texts."""
    return sum(len(tokenizer_of(markup).encode(text, add_special_tokens=False)) for text in texts)


async def check(case: Case, *deaths: int) -> None:
    calm, struck = await calm_run(case), await run(case, *deaths)
    if case.stream:
        assert joined_stream(struck) == joined_stream(calm)
        assert stream_events(struck)[-1]["usage"] == stream_events(calm)[-1]["usage"]
    else:
        assert struck == calm


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_death_at_every_token(answer: str, stream: bool) -> None:
    """Every day the number of tokens in an event changes with the place of the cut, and one streamed answer is cut everywhere."""
    texts = (ANSWERS[answer],)
    is_first = answer == next(iter(ANSWERS))
    for cut in range(0, num_tokens(texts) + 1, 1 if ALL_TESTS or (stream and is_first) else 5):
        for per_event in (1, 2, 3, 7) if ALL_TESTS else (1 + cut % 3,):
            await check(Case(texts, stream=stream, per_event=per_event), cut)


async def test_the_calm_message_is_what_the_text_says() -> None:
    (choice,) = json.loads(await calm_run(Case((ANSWERS["reasoning, message and calls"],))))["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rain? 日本", "Let me look.")
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == [("weather", {"city": "Zürich 🦜", "note": 'say "</tool_call>"'}), ("time", {})]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("answer", HARMONY)
async def test_a_death_at_every_special_token_of_harmony(answer: str, stream: bool) -> None:
    """Special tokens have no text, and one of them ends the answer; with every letter a token, most cuts are left out daily."""
    texts = (HARMONY[answer],)
    token_ids = tokenizer_of("harmony").encode(HARMONY[answer])
    for cut, token_id in enumerate(token_ids):
        if ALL_TESTS or token_id >= VOCAB_SIZE or token_ids[cut - 1] >= VOCAB_SIZE:
            await check(Case(texts, "harmony", stream=stream, per_event=1 + cut % 3), cut)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_four_choices_go_on_each_where_it_was(stream: bool) -> None:
    texts = tuple(ANSWERS.values())
    for cut in range(0, num_tokens(texts), 1 if ALL_TESTS else 17):
        await check(Case(texts, stream=stream, per_event=1 + cut % 2), cut)


@pytest.mark.parametrize("stop", [" look", "</tool_call>\n<", "Zürich", "e>\n\nLet"])
async def test_stop_strings_that_cut_a_call_or_a_marker(stop: str) -> None:
    texts = (ANSWERS["reasoning, message and calls"],)
    for cut in range(0, num_tokens(texts), 1 if ALL_TESTS else 7):
        await check(Case(texts, stream=bool(cut % 2), stop=(stop,)), cut)


async def test_a_length_that_ends_in_a_call() -> None:
    texts = (ANSWERS["reasoning, message and calls"],)
    for cut in range(0, 40, 1 if ALL_TESTS else 7):
        case = Case(texts, max_tokens=40)
        await check(case, cut)
    (choice,) = json.loads(await calm_run(case))["choices"]
    assert choice["finish_reason"] == "length"


async def test_three_deaths_of_one_answer() -> None:
    texts = (ANSWERS["reasoning, message and calls"],)
    for deaths in ((5, 5, 5), (0, 1, 0), (30, 12, 3)):
        for stream in (False, True):
            await check(Case(texts, stream=stream, per_event=2), *deaths)
