"""The router's own series: there from the start, labelled, and gone with their worker.

What metrics count for requests that did not end as their status said: broken streams, clients that disconnect. And what they and
/debug/requests say of answers with reasoning and tool calls.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import Api, make_router, running, running_api, sample, timings, until
from tests.cluster.openai.scripted_answer import ScriptedParser, ScriptedTokenizer, Step, events_of, request_of
from tests.cluster.speaking_worker import SpeakingWorker
from tests.cluster.stub_worker import ByteTokenizer, StubDirectory, StubWorker
from transom_cluster.http.api import build_api
from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.completion_writer import CompletionWriter
from transom_cluster.telemetry.router_metrics import MAIN_ENDPOINTS, MAX_EXEMPLAR_CHARS, RouterMetrics
from transom_core.config import AutoscalingConfig, LimitsConfig
from transom_core.contract import ErrorInfo, FinishReason, WorkerLoad
from transom_core.errors import Overloaded, PoisonRequest, RequestError, RequestTimeout, StepFailed
from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    MessageText,
    ReasoningText,
)

SCALING = AutoscalingConfig(
    min_replicas=0, max_replicas=8, first_token_objective_s=1.0, upscale_delay_s=1.0, downscale_delay_s=1.0
)
LIMITS = LimitsConfig(request_timeout_s=60.0)
PATH = "/v1/completions"
ASKED = {"prompt": "hi", "max_tokens": 3, "stream": True}
SCRIPT = (
    Step("<think>", state="reasoning"),
    Step("Hm", (ReasoningText("Hm"),), "reasoning"),
    Step("</think>"),
    Step("<call>oops", (MalformedMarkup("<call>oops"), MessageText("<call>oops"))),
    Step("<call>f", (CallBegin(0, "f"),), "tool_call"),
    Step("{}</call>", (CallArguments(0, "{}"), CallEnd(0, is_complete=True))),
    Step("<call>g", (CallBegin(1, "g"),), "tool_call"),
    Step("oops</call>", (CallEnd(1, is_complete=False),)),
    Step("<call>h", (CallBegin(2, "h"),), "tool_call"),
)
AT_END: tuple[AnswerPart, ...] = (CallEnd(2, is_complete=False),)


def changes(api: Api) -> list[float | None]:
    return [sample(api.router, "worker_changes_total", change=kind) for kind in ("joined", "lost", "drained")]


def test_every_series_has_model_and_router() -> None:
    router = make_router(StubWorker())
    families = {family.name: family for family in text_string_to_metric_families(router.metrics.text())}
    for family in families.values():
        for one in family.samples:
            assert {"model": "stub", "router": "r0"}.items() <= one.labels.items(), one
            assert not one.name.endswith("_created")
    for name, least in (("process_cpu_seconds_total", 0), ("process_resident_bytes", 1e6)):
        assert (sample(router, name) or 0) > least
    (build,) = families["transom_build_info"].samples
    assert {"version", "python", "ray"} <= build.labels.keys()
    assert build.value == 1
    assert "transom_router_desired_workers" not in families


def test_counts_whose_labels_are_known_are_there_at_0_from_the_start() -> None:
    """So that rates see the first event."""
    router = make_router(StubWorker())
    build_api(router)
    router.metrics.routing.joined("kv", "w")
    counted = [one for one in router.metrics.registry.collect() if one.type in ("counter", "histogram")]
    counted = [one for one in counted if "_process_" not in one.name]
    assert len(counted) > 20
    assert [family.name for family in counted if not family.samples] == []
    assert [one for family in counted for one in family.samples if one.value] == []
    for endpoint in MAIN_ENDPOINTS:
        for status in ("200", "400", "404", "499", "500", "503"):
            assert sample(router, "requests_total", endpoint=endpoint, status=status) == 0


async def test_workers_join_and_are_lost_or_drained() -> None:
    async with running_api(StubWorker(worker="w0"), StubWorker(worker="w1")) as api:
        assert changes(api) == [2, 0, 0]
        assert sample(api.router, "placements_total", policy="kv", worker="w0", reason="home") == 0
        api.worker.die()
        await until(lambda: changes(api)[0] == 3)
        assert changes(api) == [3, 1, 0]
        api.directory.remove(api.worker)
        await until(lambda: "w0" not in api.router.connections)
        assert changes(api) == [3, 1, 1]
        assert 'worker="w0"' not in api.router.metrics.text()
        assert 'worker="w1"' in api.router.metrics.text()


@pytest.mark.parametrize("stream_breaks", ["first", "at last", "never"])
async def test_a_crash_is_a_loss_whatever_the_router_hears_of_first(stream_breaks: str) -> None:
    async with running_api(StubWorker(worker="w0"), StubWorker(worker="w1")) as api:
        api.worker.is_dead, api.worker.can_open = True, False
        if stream_breaks == "first":
            api.worker.die()
            await until(lambda: changes(api) == [2, 1, 0])
        api.directory.remove(api.worker)
        await until(lambda: api.router.connections["w0"].is_draining)
        if stream_breaks == "at last":
            api.worker.die()
        await until(lambda: "w0" not in api.router.connections)
        assert changes(api) == [2, 1, 0]
        assert sample(api.router, "drains_total", outcome="finished") == 0


async def test_a_leaving_worker_that_does_not_answer_is_lost() -> None:
    """Its host is gone: calls to it do not fail, they hang."""
    impatient = timings(last_call_timeout_s=0.01)
    async with running_api(StubWorker(worker="w0"), StubWorker(worker="w1"), timings=impatient) as api:
        api.worker.info = asyncio.Event().wait  # type: ignore[assignment,method-assign]
        api.directory.remove(api.worker)
        await until(lambda: "w0" not in api.router.connections)
        assert changes(api) == [2, 1, 0]


async def test_tasks_are_counted_and_fall_back_when_requests_have_ended() -> None:
    async with running_api(StubWorker(worker="w0")) as api:
        await api.complete()
        before = sample(api.router, "tasks")
        assert before
        for _ in range(5):
            await api.complete()
        await until(lambda: sample(api.router, "tasks") == before)


async def test_desired_workers_follow_the_loads_and_the_line() -> None:
    busy = StubWorker(load=WorkerLoad(max_num_seqs=10, num_running=27, num_waiting=0))
    directory = StubDirectory()
    async with running(make_router(directory=directory, autoscaling=SCALING), 0) as router:
        assert sample(router, "desired_workers") == 0
        directory.add(busy)
        await until(lambda: sample(router, "workers", state="open") == 1)
        assert sample(router, "desired_workers") == 3
        fixed = StubWorker(worker="prefill", is_scaled=False, load=busy.load)
        directory.add(fixed)
        await until(lambda: sample(router, "workers", state="open") == 2)
        assert sample(router, "desired_workers") == 4
        directory.remove(fixed)
        await until(lambda: sample(router, "workers", state="open") == 1)
        router.connections["w0"].load = replace(busy.load, num_running=0)
        assert sample(router, "desired_workers") == 0


def test_long_request_ids_make_no_exemplar() -> None:
    metrics = RouterMetrics("r0", model="stub")
    metrics.finished("/v1/completions", 200, 0.5, request_id="x" * (MAX_EXEMPLAR_CHARS + 1))
    metrics.first_token(0.5, "é" * MAX_EXEMPLAR_CHARS)
    assert "xxx" not in metrics.text(openmetrics=True)
    assert "é" * MAX_EXEMPLAR_CHARS in metrics.text(openmetrics=True)


def counts(api: Api, family: str, label: str) -> dict[str, float]:
    """What was counted at the endpoint of completions, by a label; zeros left out."""
    samples = [one for metric in api.router.metrics.registry.collect() for one in metric.samples if one.name == family]
    return {one.labels[label]: one.value for one in samples if one.labels["endpoint"] == PATH and one.value}


def ended(api: Api) -> tuple[dict[str, float], dict[str, float]]:
    return (
        counts(api, "transom_router_requests_total", "status"),
        counts(api, "transom_router_broken_answers_total", "reason"),
    )


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (StepFailed("x"), "500", "step_failed"),
        (RequestTimeout("x"), "408", "request_timeout"),
        (PoisonRequest("x"), "500", "poison_request"),
        (Overloaded("x"), "503", "overloaded"),
        (RequestError("x"), "400", "request_refused"),
    ],
)
async def test_a_broken_stream_counts_as_its_error(
    error: Exception, status: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api(StubWorker(step_error=ErrorInfo.of(error)), limits=LIMITS) as api:
        response = await api.complete(stream=True)
        assert response.status_code == 200
        assert '"error"' in response.text
        assert ended(api) == ({status: 1}, {reason: 1})
        lines = [line.getMessage() for line in caplog.records if "broke off" in line.getMessage()]
        request = api.worker.submitted[0]
        told = [f"The stream of {request.request_id} broke off: {type(error).__name__}, {reason}"]
        assert lines == ([] if isinstance(error, RequestError) else told)  # a client's error is not logged


async def test_an_error_before_the_first_byte_is_not_a_broken_response() -> None:
    async with running_api(StubWorker(admission_error=ErrorInfo.of(Overloaded("full")))) as api:
        assert (await api.complete(stream=True)).status_code == 503
        assert ended(api) == ({"503": 1}, {})


async def test_a_client_that_disconnects_is_not_a_server_error() -> None:
    async with running_api(StubWorker(max_events=1)) as api:
        before = api.call(PATH, {**ASKED, "stream": False})
        await until(lambda: api.worker.num_silent == 1)
        assert sample(api.router, "in_flight_requests", worker="w0") == 1
        await before.leave()
        await until(lambda: len(api.worker.aborted) == 1)
        assert sample(api.router, "in_flight_requests", worker="w0") == 0
        assert ended(api) == ({"499": 1}, {})
        after = api.call(PATH, ASKED)
        await after.begun()
        await after.leave()
        assert (after.status, *ended(api)) == (200, {"499": 2}, {"client_left": 1})


async def test_a_bug_after_the_last_chunk_counts_as_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CompletionWriter) -> Iterator[str]:
        raise KeyError

    async with running_api() as api:
        monkeypatch.setattr(CompletionWriter, "stream_end", broken)
        await api.call(PATH, {**ASKED, "max_tokens": 1}).ended()
        assert ended(api) == ({"500": 1}, {"internal_error": 1})


def reader_of(steps: Sequence[Step], at_end: tuple[AnswerPart, ...] = ()) -> AnswerReader:
    return AnswerReader(ScriptedTokenizer(steps), request_of().params, ScriptedParser(steps, at_end))  # type: ignore[arg-type]


def read(reader: AnswerReader, steps: Sequence[Step], reason: FinishReason = "length") -> None:
    for event in events_of(steps, reason=reason):
        reader.read(event)


def test_calls_by_outcome_degraded_answers_and_reasoning_are_counted() -> None:
    metrics = RouterMetrics("r", model="m", tool_parser="hermes")
    readers = [reader_of(SCRIPT, AT_END), reader_of(SCRIPT[:3])]
    read(readers[0], SCRIPT)
    read(readers[1], SCRIPT[:3])
    metrics.answers.answered(readers)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model": "m", "router": "r", **labels})

    def calls(outcome: str) -> float | None:
        return value("transom_router_tool_calls_total", parser="hermes", outcome=outcome)

    assert (calls("parsed"), calls("malformed"), calls("incomplete")) == (1, 2, 1)
    assert value("transom_router_degraded_answers_total", parser="hermes") == 1
    assert value("transom_router_reasoning_tokens_total") == 2


def test_a_broken_call_alone_does_not_degrade_an_answer() -> None:
    reader = reader_of(SCRIPT[6:8])
    read(reader, SCRIPT[6:8], "stop")
    assert not reader.tally.has_degraded
    assert reader.tally.num_malformed == 1


SPOKEN = '<think>Hm</think>Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
PLACES = {  # what the answer is at, and how many calls have begun, where this follows
    "m</think>": ("reasoning", 0),
    "see": ("message", 0),
    "1}}": ("tool_call", 1),
}


async def lines_of(api: Api) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = (await api.client.get("/debug/requests")).json()["requests"]
    return lines


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("following", "expected"), PLACES.items())
async def test_debug_requests_show_what_a_running_answer_is_at(
    following: str, expected: tuple[str, int], stream: bool
) -> None:
    num_tokens = SPOKEN.index(following)  # each is a byte
    worker = SpeakingWorker(tokenizer=ByteTokenizer(), texts=(SPOKEN,), max_events=num_tokens)  # type: ignore[arg-type]
    async with running_api(worker, tool_call_parser="hermes", reasoning_parser="qwen3") as api:
        call = api.call("/v1/chat/completions", {**CHAT, "tool_choice": "required", "stream": stream})
        await until(lambda: worker.num_silent and worker.is_read)

        def figures(line: dict[str, Any]) -> tuple[Any, ...]:
            return line["state"], line["answers"], line["tool_calls"], line["grammar"]

        state, num_calls = expected
        await until(lambda: len(api.router.timelines.summaries("all", None, 1)) == 1)
        (line,) = await lines_of(api)
        assert figures(line) == ("running", [state], num_calls, True)
        worker.go()
        await call.task
        (line,) = await lines_of(api)
        assert figures(line) == ("finished", ["message"], 1, True)
        assert line["reasoning_tokens"] == len("Hm</think>") - 1
        assert sample(api.router, "tool_calls_total", parser="hermes", outcome="parsed") == 1
        assert sample(api.router, "reasoning_tokens_total") == line["reasoning_tokens"]
