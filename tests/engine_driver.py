"""Drives an engine in tests: requests in, whole answers out."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

from tests.cpu_threads import NUM_THREADS
from tests.hooked_executor import HookedExecutor
from transom_core.clock import steady_time_s
from transom_core.config import EngineConfig
from transom_core.contract import (
    ErrorInfo,
    LogprobTable,
    OutputEvent,
    Request,
    SamplingParams,
    TokenLogprobs,
    WorkerMessage,
)
from transom_core.settings.settings import Settings
from transom_worker.engine.engine import Engine
from transom_worker.engine.engine_thread import EngineThread
from transom_worker.engine.startup import build_engine
from transom_worker.execution.executor import Executor
from transom_worker.execution.executor_factory import create_executor
from transom_worker.execution.setup import dummy_run, model_setup
from transom_worker.telemetry.engine_timelines import Clock

WAIT_S = 120  # for what another thread does


@dataclass
class Whole:
    """One answer, put together from its events; positions and offsets are checked on the way."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0

    def add(self, event: OutputEvent, *, first_position: int) -> None:
        assert self.finish_reason is None, "an event after the last"
        assert event.error is None, event.error
        assert event.position == first_position + len(self.token_ids)
        self.token_ids += event.token_ids
        self.text += event.text
        self.logprobs += event.logprobs or ()
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if event.usage is not None:
            self.num_cached_tokens = event.usage.num_cached_tokens


def make_engine(
    model: str,
    *,
    executor: Callable[[EngineConfig], Executor] = create_executor,
    clock: Clock = steady_time_s,
    **settings: object,
) -> Engine:
    """An engine over a small pool; `executor` makes its executor."""
    values = {"kv_cache_memory_bytes": "8MiB", "max_num_seqs": 16, "num_threads": NUM_THREADS, **settings}
    config = Settings.parse(model=model, **values).engine_config()
    return build_engine(config, executor=executor(config), clock=clock)


def whole_warm_up() -> AbstractContextManager[object]:
    """Engines that start meanwhile warm up as a user's engine does; see `short_warm_up` in the conftest."""
    return patch.object(model_setup, "warm_up", dummy_run.warm_up)


def make_hooked_engine(model: str, **settings: Any) -> tuple[Engine, HookedExecutor]:
    """An engine over a small pool, and its executor, with which a test can interfere with the engine's steps."""
    engine = make_engine(model, executor=HookedExecutor, **settings)
    assert isinstance(engine.executor, HookedExecutor)
    return engine, engine.executor


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    resumed: list[int] | None = None,
    grammar: str | None = None,
    **params: object,
) -> Request:
    """A request with a fixed seed; greedy unless `params` say otherwise."""
    values = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **params}
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**values),  # type: ignore[arg-type]
        seed=1234,
        resumed_output_ids=tuple(resumed or ()),
        grammar=grammar,
    )


class Unusable(tuple[int, ...]):
    """Token ids that nothing can look at."""

    def __iter__(self) -> Iterator[int]:
        raise TypeError("not a number")


def unusable_request(request_id: str) -> Request:
    """A request whose admission raises a TypeError, as a bug would."""
    return replace(make_request(request_id, []), prompt_token_ids=Unusable((5,)))


def are_close(got: list[TokenLogprobs], expected: list[TokenLogprobs]) -> bool:
    """Whether the same tokens have the same ranks and log-probabilities, but for the order of sums."""
    return len(got) == len(expected) and all(
        a.token_id == b.token_id and a.rank == b.rank and abs(a.logprob - b.logprob) < 1e-4
        for one, other in zip(got, expected, strict=True)
        for a, b in zip((one.chosen, *one.top), (other.chosen, *other.top), strict=True)
    )


def drain(engine: Engine) -> list[OutputEvent]:
    """Step until there is no work; return the events on the way."""
    events = []
    while engine.has_work:
        events += engine.step()
    return events


def num_active(engine: Engine) -> int:
    """The blocks of all groups that sequences reference."""
    return sum(group.active_blocks for group in engine.scheduler.stats().groups)


class OnThread:
    """An engine on its thread, and what it delivers."""

    def __init__(self, engine: Engine, *, on_hang: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.delivered: SimpleQueue[WorkerMessage] = SimpleQueue()
        self.thread = EngineThread(engine, self.delivered.put, on_hang=on_hang)

    def submit(self, *requests: Request) -> list[ErrorInfo | None]:
        return self.thread.submit(list(requests)).result(WAIT_S)

    def last_event(self, request_id: str) -> OutputEvent:
        """Wait for the end of a request."""
        while True:
            for event in self.delivered.get(timeout=WAIT_S).events:
                if event.request_id == request_id and event.finish_reason:
                    return event


def run(engine: Engine, requests: list[Request]) -> list[Whole]:
    """Run requests together to their ends, as `EngineThread` does; nothing may be left of them."""
    answers = {request.request_id: Whole() for request in requests}
    resumed = {request.request_id: len(request.resumed_output_ids) for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        events: list[OutputEvent] = []
        events += engine.step(events.extend)
        for event in events:
            answers[event.request_id].add(event, first_position=resumed[event.request_id])
    assert all(whole.finish_reason for whole in answers.values())
    assert num_active(engine) == 0
    return list(answers.values())


def embeddings(engine: Engine, prompts: list[list[int]], pooling: str) -> list[OutputEvent]:
    """Run prompts together; the event with each one's embedding."""
    for index, ids in enumerate(prompts):
        engine.add(make_request(str(index), ids, max_tokens=1, pooling=pooling))
    found = {event.request_id: event for event in drain(engine)}
    return [found[str(index)] for index in range(len(prompts))]


def prompt_logprobs(engine: Engine, prompts: list[list[int]], **params: Any) -> list[LogprobTable]:
    """Run prompts together; each one's log-probabilities of 20 tokens and the next one at every position, or as `params` say.

    Each must get them exactly once, with its first event.
    """
    for index, ids in enumerate(prompts):
        engine.add(make_request(str(index), ids, **{"max_tokens": 1, "prompt_logprobs": 20, **params}))
    found: dict[str, LogprobTable] = {}
    seen: set[str] = set()
    for event in drain(engine):
        assert (event.prompt_logprobs is not None) == (event.request_id not in seen)
        seen.add(event.request_id)
        if event.prompt_logprobs is not None:
            found[event.request_id] = event.prompt_logprobs
    return [found[str(index)] for index in range(len(prompts))]
