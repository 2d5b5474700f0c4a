"""What a client waits for beside a hostile one that sends anything to any route, counted in steps, tokens and turns.

`tests/worker/scheduling/test_step_shares.py` compares waits with those beside an ordinary client, in simulated time. Here a router
and a worker with a real engine show that nothing before the scheduler lets the hostile client pass either. A step counts as long as
a slow device would need, so that the shares of its time do not depend on the machine.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.cluster.engine_server import EngineServer, engine_server
from tests.how_many import num_examples
from transom_cluster.router.request_queue import MAX_PLACED_AT_ONCE
from transom_core.config import LimitsConfig
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepResult, StepTimings

STEP_TOKENS, NUM_SLOTS = 64, 6
VICTIMS, HOSTILE = ("one", "two"), "hostile"
VICTIM_REST, VICTIM_OUTPUT, NUM_REQUESTS = (9,) * 18, 8, 3
MAX_STEPS = 8  # from the arrival at the worker to the first token, and between tokens; a slot is claimed at once
MAX_TOKENS = MAX_STEPS * STEP_TOKENS // 2  # of others' prompts, meanwhile
MAX_PASSING = (
    8 * MAX_PLACED_AT_ONCE
)  # sequences of others that come to the worker after a request has come to the router
CLIENT_S = 240
FREE = {"ignore_eos": True}


def prompt_of(victim: int, number: int) -> list[int]:
    return [victim, 5 + number % 200, *VICTIM_REST]


def is_victims(sequence: Sequence) -> bool:
    return sequence.request.prompt_token_ids[2:] == VICTIM_REST


class Watch(SchedulerListener):
    """Counts what others get while a victim waits."""

    def begin(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = self.num_queued = 0  # of others: tokens that were computed, sequences
        self.arrived: dict[int, int] = {}  # victim -> `num_queued` when its request came to the router
        self.since: dict[str, tuple[int, int]] = {}  # request -> (`num_steps`, `num_prompt_tokens`) at its last token
        self.num_first = self.most_steps = self.most_tokens = self.most_passing = 0

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        if not is_victims(sequence):
            self.num_queued += 1
            return
        self.since[sequence.request.request_id] = self.num_steps, self.num_prompt_tokens
        passing = self.num_queued - self.arrived[sequence.request.prompt_token_ids[0]]
        self.most_passing = max(self.most_passing, passing)

    def note_arrivals(self, api: Any) -> Any:
        """A middleware."""

        async def call(scope: Any, receive: Any, send: Any) -> None:
            key = dict(scope.get("headers", ())).get(b"x-api-key", b"").decode()
            if key in VICTIMS:
                self.arrived[VICTIMS.index(key)] = self.num_queued
            await api(scope, receive, send)

        return call

    def count_steps(self, scheduler: Scheduler) -> None:
        receive = scheduler.receive

        def counting(result: StepResult) -> list[SequenceOutput]:
            step = scheduler.steps_in_flight[0]
            rows = list(zip(step.plan.start, step.plan.count, step.rows, strict=True))
            seconds = 15e-3 + sum(1.4e-3 + start * 1e-6 if num == 1 else num * 1e-3 for start, num, _ in rows)
            result.timings = StepTimings(forward_s=seconds)
            self.num_steps += 1
            self.num_prompt_tokens += sum(num for _, num, one in rows if num > 1 and not is_victims(one))
            outputs = receive(result)
            for output in outputs:
                if (since := self.since.get(output.request_id)) is not None:
                    self.num_first += output.is_first
                    self.most_steps = max(self.most_steps, self.num_steps - since[0])
                    self.most_tokens = max(self.most_tokens, self.num_prompt_tokens - since[1])
                    self.since[output.request_id] = self.num_steps, self.num_prompt_tokens
            return outputs

        scheduler.admission.listeners.append(self)
        scheduler.receive = counting  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[tuple[EngineServer, Watch]]:
    watch = Watch()
    keys = {"api_keys": (*VICTIMS, HOSTILE), "limits": LimitsConfig(request_timeout_s=CLIENT_S)}
    sizes: dict[str, Any] = {
        "max_num_seqs": NUM_SLOTS,
        "max_num_batched_tokens": STEP_TOKENS,
        "kv_cache_memory_bytes": "1MiB",
    }
    with engine_server(tiny_model, server=keys, wrap=watch.note_arrivals, max_waiting=512, **sizes) as server:
        watch.count_steps(server.replica.engine.scheduler)
        yield server, watch


def prompts(num_tokens: int, count: int) -> list[list[int]]:
    return [[5 + i, *[7] * (num_tokens - 1)] for i in range(count)]


def schema(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"json": {"properties": {f"{number}_{i}": {} for i in range(300)}}}}


completions = st.builds(
    lambda prompt, max_tokens, form: ("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **FREE, **form}),
    st.builds(prompts, st.integers(1, 200), st.sampled_from([1, 8, 60])),
    st.sampled_from([1, 20, 60]),
    st.one_of(
        st.just({}),
        st.builds(schema, st.integers(0, 9)),
        st.builds(lambda number: {"structured_outputs": {"regex": f"(a|b{number})+"}}, st.integers(0, 10**6)),
        st.builds(lambda width: {"kv_policy": {"type": "window", "sinks": 0, "window": width}}, st.integers(16, 500)),
    ),
)
SEQUENCES = ("/v1/completions", {"prompt": prompts(40, 120), "max_tokens": 4, **FREE})
GRAMMARS = ("/v1/completions", {"prompt": "x", "max_tokens": 20, **schema(10)})
TEXT = ("/tokenize", {"prompt": "\u1700" * 200_000})
PAGES = ("/metrics", None)
requests = st.one_of(
    completions,
    st.builds(
        lambda num: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * num}]}),
        st.integers(1, 5000),
    ),
    st.sampled_from(
        [TEXT, PAGES, ("/debug/requests?limit=1", None), ("/v1/completions", {"prompt": 5}), ("/nowhere", {})]
    ),
)
# A request, how many connections send it again and again, and after how many seconds they leave and send the next one.
attacks = st.lists(
    st.tuples(requests, st.sampled_from([1, 4]), st.sampled_from([0.02, 0.3, CLIENT_S])), min_size=1, max_size=5
)


async def attack(url: str, path: str, body: dict[str, Any] | None, leave_s: float, ended: asyncio.Event) -> None:
    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": HOSTILE}, timeout=CLIENT_S) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(leave_s):
                    await client.request("GET" if body is None else "POST", path, json=body)
            ended.set()


async def victim(url: str, number: int, ended: list[asyncio.Event]) -> None:
    """Send one request after the other, until each of the hostile connections has ended one."""
    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": VICTIMS[number]}, timeout=CLIENT_S) as client:
        for at in itertools.count():
            if at >= NUM_REQUESTS and all(one.is_set() for one in ended):
                return
            sent = {"prompt": prompt_of(number, at), "max_tokens": VICTIM_OUTPUT, **FREE}
            (await client.post("/v1/completions", json=sent)).raise_for_status()


@settings(
    max_examples=num_examples(3, 60),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(sent=attacks)
@example(sent=[(SEQUENCES, 4, CLIENT_S), (TEXT, 2, CLIENT_S), (PAGES, 4, CLIENT_S)])
@example(sent=[(SEQUENCES, 2, 0.3), (GRAMMARS, 4, 0.02)])
def test_no_client_passes_another_one_whatever_it_sends(served: tuple[EngineServer, Watch], sent: list[Any]) -> None:
    server, watch = served
    watch.begin()

    async def run() -> None:
        connections = [
            (path, body, leave_s, asyncio.Event()) for (path, body), num, leave_s in sent for _ in range(num)
        ]
        hostile = [asyncio.create_task(attack(server.url, *one)) for one in connections]
        ended = [one[-1] for one in connections]
        await asyncio.gather(*(victim(server.url, number, ended) for number in range(len(VICTIMS))))
        for task in hostile:
            task.cancel()
        await asyncio.wait(hostile)
        await server.until_quiet()

    asyncio.run(run())
    assert watch.num_first >= len(VICTIMS) * NUM_REQUESTS
    assert watch.most_steps <= MAX_STEPS
    assert watch.most_tokens <= MAX_TOKENS
    assert watch.most_passing <= MAX_PASSING
