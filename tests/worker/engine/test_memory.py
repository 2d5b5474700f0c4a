"""Steps that run out of memory: the request that asked for the most ends, and nothing leaks. That the others give a calm run's
tokens is in `end_to_end/test_combinations`.

Days of traffic: nothing in an engine grows with the number of requests that it has ever seen. All containers that can be reached
from an engine are counted, after some requests and after many more of them; what is kept of ended requests on purpose has a bound,
which the test lowers so that it is reached.
"""

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.container_sizes import container_sizes, growth
from tests.engine_driver import Whole, drain, make_request, run
from tests.how_many import num_examples
from tests.memory_faults import OutOfMemoryExecutor, Place
from tests.worker.conftest import Start
from transom_core.contract import OutputEvent, Request
from transom_core.errors import EngineDead
from transom_core.telemetry import request_timelines
from transom_worker.engine.engine import MAX_OUT_OF_MEMORY, Engine
from transom_worker.kvcache import manager
from transom_worker.kvcache.eviction import eviction_policy
from transom_worker.kvcache.eviction.policy_memory import Ghosts, WatchRing
from transom_worker.kvcache.eviction.return_times import ReturnTimes
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.scheduling.step import StepPlan
from transom_worker.scheduling.step_budget import STEPS_BEFORE_GROWTH, StepTokenLimit


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
