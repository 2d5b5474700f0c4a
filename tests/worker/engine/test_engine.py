"""The engine's admission and its ends (what it refuses, its messages, and that no block stays in use), and the load that it
reports.

Steps that run out of memory: the request that asked for the most ends, and nothing leaks. That the others give a calm run's tokens
is in `end_to_end/test_combinations`.

Days of traffic: nothing in an engine grows with the number of requests that it has ever seen. All containers that can be reached
from an engine are counted, after some requests and after many more of them; what is kept of ended requests on purpose has a bound,
which the test lowers so that it is reached.
"""

import gc
import json
import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.container_sizes import container_sizes, growth
from tests.engine_driver import Whole, drain, make_engine, make_request, run
from tests.how_many import num_examples
from tests.memory_faults import OutOfMemoryExecutor, Place
from tests.worker.conftest import Start
from transom_core.clock import steady_time_s
from transom_core.contract import FetchSpeed, OutputEvent, Request, WorkerLoad
from transom_core.errors import ConfigError, EngineDead, RequestError
from transom_core.telemetry import request_timelines
from transom_worker.engine.engine import MAX_OUT_OF_MEMORY, Engine
from transom_worker.engine.running_request import RunningRequest
from transom_worker.engine.state_report import LEAST_FETCHED_BYTES, MAX_PLACES, WAITS_FADE_S, StepRates
from transom_worker.kvcache import manager
from transom_worker.kvcache.eviction import eviction_policy
from transom_worker.kvcache.eviction.policy_memory import Ghosts, WatchRing
from transom_worker.kvcache.eviction.return_times import ReturnTimes
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.step import StepPlan
from transom_worker.scheduling.step_budget import STEPS_BEFORE_GROWTH, StepTokenLimit

HOUR_S = 3600.0


@pytest.fixture
def engine(start: Start) -> Engine:
    return start(max_waiting=2, max_num_seqs=2)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([1, 2048], {}, "prompt", "Token id 2048 is outside the vocabulary"),
        ([1], {"logit_bias": {5000: 1.0}}, "logit_bias", "5000"),
        ([1], {"stop_token_ids": (4000,)}, "stop_token_ids", "4000"),
        ([1], {"resumed": [3, -7]}, "resumed_output_ids", "-7"),
    ],
)
def test_wrong_requests_are_refused_at_admission(
    engine: Engine, prompt: list[int], params: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.add(make_request("r", prompt, **params))
    assert caught.value.param == param
    assert not engine.has_work


def test_a_length_that_the_pool_cannot_hold_is_refused_at_start(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"KV pool holds \d+ tokens .* 2000"):
        start(kv_cache_memory_bytes="512KiB", max_model_len=2000)


@pytest.mark.parametrize("skew_s", [-24 * HOUR_S, 0.0, 24 * HOUR_S])
def test_deadlines_and_measurements_do_not_depend_on_the_hosts_clock(start: Start, skew_s: float) -> None:
    """Hosts' clocks may differ by any amount: a worker measures, and ends requests, by durations alone."""
    engine = start(clock=lambda: steady_time_s() + skew_s)
    run(engine, [make_request("cold", [5, 6, 7], max_tokens=2)])
    for name, waited_s in (("a", 0.0), ("b", HOUR_S)):  # what it waited in its router is not this worker's
        in_time = replace(make_request(name, [5, 6, 7], max_tokens=3), time_left_s=HOUR_S, waited_s=waited_s)
        [output] = run(engine, [in_time])
        assert output.finish_reason == "length"
    assert 0 < engine.load().first_token_s < HOUR_S / 2
    engine.add(replace(make_request("late", [5, 6], max_tokens=500), time_left_s=0.0))
    engine.add(make_request("other", [5, 6], max_tokens=3))
    events = drain(engine)
    (late,) = [event for event in events if event.request_id == "late"]
    assert late.error is not None
    assert late.error.kind == "RequestTimeout"
    assert [event.finish_reason for event in events if event.request_id == "other"][-1] == "length"


@pytest.mark.parametrize("num_steps", [0, 2])
def test_many_aborts_publish_the_state_once(start: Start, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    """Statistics of the whole cache are not computed for every request that leaves, and the last state is published."""
    engine = start()
    for i in range(12):
        engine.add(make_request(f"r{i}", [5, 6, i], max_tokens=100))
    for _ in range(num_steps):
        engine.step()
    states = []
    monkeypatch.setattr(engine.events, "published", states.append)
    for i in range(12):
        engine.abort(f"r{i}")
    assert drain(engine) == []
    assert len(states) == 1
    assert (states[0].load.num_running, states[0].load.num_waiting) == (0, 0)


def test_before_min_tokens_no_end_of_text_is_sampled_of_the_models_files_or_the_tokenizer(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Many fine-tuned models name one in their configs, and another in their tokenizers."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 7}))
    engine = make_engine(str(folder))
    ends = set(engine.info.eos_token_ids), set(engine.tokenizer.eos_token_ids)
    assert ends[0] < ends[1]
    for eos in ends[1]:
        bias: dict[str, Any] = {"logit_bias": {eos: 100.0}, "ignore_eos": False, "max_tokens": 6, "min_tokens": 4}
        (whole,) = run(engine, [make_request(f"{eos}", [10, 11, 12], **bias)])
        assert whole.token_ids.index(eos) == len(whole.token_ids) - 1 == 4
        assert (whole.finish_reason, whole.stop_reason) == ("stop", None)
    engine.shutdown()


def test_no_event_follows_an_abort(start: Start) -> None:
    """Not even one that waits for the next plan, of a request that has ended with it."""
    engine, delivered = start(steps_in_flight=2), list[list[OutputEvent]]()
    for name, max_tokens in (("ended", 1), ("goes on", 9)):
        engine.add(make_request(name, [5, 6, 7], max_tokens=max_tokens))
    assert engine.step(delivered.append) == []
    assert not engine.abort("ended")
    assert engine.abort("goes on")
    assert drain(engine) + delivered == []


def test_a_failure_in_one_requests_text_loses_no_other_requests_event(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests end in one step; the second one's text fails. The first one's last event still goes out."""
    token_event = RunningRequest.token_event

    def fail(running: RunningRequest, output: SequenceOutput) -> OutputEvent:
        if output.request_id == "r1":
            raise UnicodeError("no such text")
        return token_event(running, output)

    for i in range(2):
        engine.add(make_request(f"r{i}", [5, 6, 7], max_tokens=1))
    monkeypatch.setattr(RunningRequest, "token_event", fail)
    events = {event.request_id: event for event in engine.step()}
    assert events["r0"].finish_reason == "length"
    assert events["r1"].error is not None
    assert not engine.has_work
    assert engine.step() == []


def test_a_deadline_is_its_own_requests_alone(start: Start) -> None:
    """An id that is used again after its first request has ended does not inherit that one's deadline."""
    now_s = 1000.0
    engine = start(clock=lambda: now_s)
    engine.add(replace(make_request("again", [5], max_tokens=1), time_left_s=60.0))
    drain(engine)
    engine.add(make_request("again", [5], max_tokens=5))
    now_s += 3600
    events = [event for _ in range(5) for event in engine.step()]
    assert [event.error for event in events] == [None] * 5


def test_a_report_counts_what_is_left_to_compute_and_what_is_held(start: Start) -> None:
    engine = start(max_num_seqs=2, max_num_batched_tokens=64)
    assert engine.load() == WorkerLoad(max_num_seqs=2)
    for at in range(3):
        engine.add(make_request(f"r{at}", list(range(at * 100, at * 100 + 100)), max_tokens=6))
    waiting = engine.load()
    assert (waiting.num_running, waiting.num_waiting, waiting.waiting_tokens) == (0, 3, 300)
    assert waiting.used_share == 0
    reports = []
    while engine.has_work:
        engine.step()
        reports.append(engine.load())
    first = reports[0]
    assert (first.num_running, first.num_waiting) == (1, 2)
    assert 300 - 64 - 1 <= first.waiting_tokens <= 300 - 64
    assert 0 < first.used_share < 1
    assert {report.num_running + report.num_waiting for report in reports} == {3, 2, 1, 0}
    assert [report.waiting_tokens for report in reports] == sorted((r.waiting_tokens for r in reports), reverse=True)
    last = reports[-1]
    assert (last.num_running, last.num_waiting, last.waiting_tokens, last.used_share) == (0, 0, 0, 0)
    assert last.prefill_tokens_per_s > 0
    assert last.decode_step_s > 0
    assert last.first_token_s == 0  # all came before the first step, which compiles
    run(engine, [make_request("warm", [5, 6, 7])])
    assert engine.load().first_token_s > 0


def test_preempted_tokens_count_as_waiting(start: Start) -> None:
    engine = start(max_num_seqs=4)
    for at in range(2):
        engine.add(make_request(f"r{at}", list(range(at * 100, at * 100 + 50)), max_tokens=40))
    while engine.load().waiting_tokens:
        engine.step()
    assert engine.load().used_share > 0
    assert engine.abort("r0")
    assert engine.load().num_running == 1
    engine.scheduler.admission.preempt_all()
    assert engine.load().num_waiting == 1
    assert engine.load().waiting_tokens > 50
    assert engine.load().used_share == 0


def test_rates_forget_the_cold_start_and_weigh_steps_by_their_length() -> None:
    rates = StepRates()
    rates.stepped(2000, 1, 10.0, now_s=10.0)  # compiling
    assert rates.prefill_tokens_per_s == 0
    rates.stepped(1000, 2, 0.1, now_s=11.0)
    assert rates.prefill_tokens_per_s == pytest.approx(10_000)
    rates.stepped(30, 1, 0.01, now_s=12.0)  # a short prompt, slow by its fixed part: hardly counts
    assert 9_000 < rates.prefill_tokens_per_s < 10_000
    rates.stepped(8, 8, 0.02, now_s=13.0)
    rates.stepped(10, 2, 5.0, now_s=18.0)  # too few prompt tokens for a rate, too many for a decode step
    assert rates.decode_step_s == 0.02
    for _ in range(40):
        rates.stepped(1000, 2, 0.2, now_s=20.0)
    assert rates.prefill_tokens_per_s == pytest.approx(5_000, rel=0.01)


def test_fetches_are_measured_by_place_and_the_last_places_are_kept() -> None:
    rates = StepRates()
    rates.fetched("near/device", LEAST_FETCHED_BYTES, 0.001, 0.001, now_s=0.0)
    rates.fetched("far/host", LEAST_FETCHED_BYTES, 0.1, 0.1, now_s=0.0)
    rates.fetched("far/host", LEAST_FETCHED_BYTES - 1, 10.0, 10.0, now_s=0.0)  # too small
    found = {place: speed.bytes_per_s for place, speed in rates.fetch_speeds(0.0).items()}
    assert found["near/device"] == pytest.approx(100 * found["far/host"])
    assert found["far/host"] < found[""] < found["near/device"]
    for number in range(2 * MAX_PLACES):
        rates.fetched(f"{number}/device", LEAST_FETCHED_BYTES, 0.1, 0.1, now_s=0.0)
    assert len(rates.fetch_speeds(0.0)) == MAX_PLACES
    assert {"", f"{2 * MAX_PLACES - 1}/device"} <= rates.fetch_speeds(0.0).keys()


def test_waits_for_fetches_count_apart_from_the_rate_also_of_small_ones_and_fade() -> None:
    rates, default = StepRates(), FetchSpeed()
    for _ in range(40):
        rates.fetched("a/device", 1000, 0.3, 0.001, now_s=10.0)
    wait_s, bytes_per_s = rates.fetch_speeds(10.0)["a/device"]
    assert wait_s == pytest.approx(0.299, rel=0.01)
    assert bytes_per_s == default.bytes_per_s
    rates.fetched("a/device", 0, 30.0, 0.0, now_s=10.0)  # it brought nothing
    assert rates.fetch_speeds(10.0)["a/device"].wait_s == wait_s
    after = rates.fetch_speeds(10.0 + WAITS_FADE_S)["a/device"].wait_s
    assert after - default.wait_s == pytest.approx((wait_s - default.wait_s) / 2)


def prompt(i: int, length: int) -> list[int]:
    return [(31 * i + 17 * j) % 1900 + 40 for j in range(length)]


def make(start: Start, **settings: Any) -> tuple[Engine, OutOfMemoryExecutor]:
    engine = start(executor=OutOfMemoryExecutor, block_size=8, **{"max_num_batched_tokens": 64, **settings})
    assert isinstance(engine.executor, OutOfMemoryExecutor)
    return engine, engine.executor


def run_to_the_end(engine: Engine, asked: list[Request]) -> tuple[dict[str, Whole], dict[str, OutputEvent]]:
    """Answers of the requests, and the error events of those that fail."""
    answers, errors = {one.request_id: Whole() for one in asked}, {}
    for one in asked:
        engine.add(one)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                errors[event.request_id] = event
            else:
                answers[event.request_id].add(event, first_position=0)
    return answers, errors


def test_the_request_that_asked_for_the_most_ends(start: Start) -> None:
    engine, executor = make(start)
    asked = [make_request(f"r{n}", prompt(n, n), max_tokens=4) for n in (5, 40, 9)]
    executor.fault = lambda plan: "end" if plan.step_id == 0 else None
    answers, errors = run_to_the_end(engine, asked)
    assert list(errors) == ["r40"]
    assert errors["r40"].error is not None
    assert "40 tokens computed, 1 positions with logits, 40 tokens of context" in errors["r40"].error.message
    assert all(len(whole.token_ids) == 4 for request_id, whole in answers.items() if request_id != "r40")


def test_an_engine_without_progress_ends(start: Start) -> None:
    """The last culprits end with the reason; the others may migrate."""
    engine, executor = make(start)
    executor.fault = lambda plan: "forward"
    _, errors = run_to_the_end(engine, [make_request(f"r{i}", prompt(i, 10 + 20 * i)) for i in range(6)])
    assert executor.num_faults == MAX_OUT_OF_MEMORY
    kinds = [event.error.kind for event in errors.values() if event.error]
    assert sorted(kinds) == ["EngineDead"] * 3 + ["OutOfMemory"] * 3
    with pytest.raises(EngineDead, match="ran out of memory"):
        engine.add(make_request("late", [5]))


def test_a_failed_steps_tensors_are_freed(start: Start) -> None:
    """The error passed through frames that have tensors as local variables."""
    engine, executor = make(start)
    seen: list[weakref.ref[torch.Tensor]] = []
    runner = executor._runner
    assert runner is not None
    launch = runner._sampler.launch

    def fail(logits: torch.Tensor, *args: object) -> object:
        large = logits.clone()
        seen.append(weakref.ref(large))
        raise torch.OutOfMemoryError(f"no memory beside {large.shape}")

    runner._sampler.launch = fail  # type: ignore[assignment,method-assign]
    gc.disable()
    try:
        engine.add(make_request("r", prompt(0, 40)))
        (event,) = engine.step()
        assert event.error is not None
        assert seen[0]() is None
    finally:
        gc.enable()
        runner._sampler.launch = launch  # type: ignore[method-assign]
    assert len(run(engine, [make_request("again", prompt(0, 40), max_tokens=3)])[0].token_ids) == 3


def test_steps_are_smaller_for_a_while(start: Start) -> None:
    engine, executor = make(start)
    sizes: list[int] = []

    def fault(plan: StepPlan) -> Place | None:
        sizes.append(plan.num_tokens)
        return "apply" if len(sizes) == 1 else None

    executor.fault = fault
    run_to_the_end(engine, [make_request("long", prompt(0, 64)), make_request("next", prompt(1, 80), max_tokens=4)])
    assert sizes[:4] == [64, 32, 32, 16]


def test_a_limit_grows_back() -> None:
    limit = StepTokenLimit(100)
    limit.ran_out_of_memory(60)
    limit.ran_out_of_memory(30)
    seen = []
    for _ in range(3 * STEPS_BEFORE_GROWTH):
        seen.append(limit.num_tokens)
        limit.stepped()
    assert sorted(set(seen)) == [15, 30, 60]
    assert limit.num_tokens == 100
    limit.ran_out_of_memory(1)
    assert limit.num_tokens == 1


AT_ONCE = 64
NUM_REQUESTS = num_examples(daily=640, exhaustive=50_000)
# These have bounds of their own: five minutes of history by the second, four entries for each page of the pool, the vocabulary.
BOUNDED = (".block_map_log.history._entries", "cache.arena._longest", ".tokenizer._bytes", ".tokenizer.whole_texts[]")


def serve(engine: Engine, begin: int, end: int) -> None:
    """Requests of every fate: complete, aborted while they wait or run, late, refused; all with prompts of their own."""
    for first in range(begin, end, AT_ONCE):
        for number in range(first, first + AT_ONCE):
            prompt = [number % 97, number // 97 % 97, number // 97**2 % 97, *range(16)]
            request = make_request(f"cmpl-{number}-0-0", prompt, max_tokens=1 + number % 2)
            engine.add(replace(request, time_left_s=3600.0, priority=number % 3, cache_salt=f"client {number % 500}"))
            if number % 7 == 0:
                engine.abort(request.request_id)
            if number % 11 == 0:
                engine.add(replace(request, request_id=f"late-{number}", time_left_s=0.0))
        engine.step()
        engine.abort(f"cmpl-{first + 1}-0-0")
        drain(engine)
        engine.metrics.text()
        engine.scheduler.cache.changes.take()


@pytest.fixture
def low_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "PrefixIndex", partial(PrefixIndex, remembered=200))
    monkeypatch.setattr(eviction_policy, "ReturnTimes", lambda: ReturnTimes(WatchRing(capacity=256)))
    monkeypatch.setattr(eviction_policy, "Ghosts", lambda: Ghosts(capacity=256))
    init = request_timelines.TimelineStore.__init__
    monkeypatch.setattr(
        request_timelines.TimelineStore, "__init__", lambda store: init(store, max_timelines=100, max_ended_events=500)
    )


@pytest.mark.usefixtures("low_bounds")
def test_an_engine_does_not_grow_with_its_requests(start: Start) -> None:
    engine = start(max_num_seqs=AT_ONCE, kv_cache_memory_bytes="1MiB", max_num_batched_tokens=4096)
    serve(engine, 0, NUM_REQUESTS)
    before = container_sizes(engine)
    serve(engine, NUM_REQUESTS, 3 * NUM_REQUESTS)
    grown = growth(before, container_sizes(engine), least=NUM_REQUESTS // 20)
    assert [path for path in grown if not any(known in path for known in BOUNDED)] == []
