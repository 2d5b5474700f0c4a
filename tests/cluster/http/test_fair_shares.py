"""What a client waits for beside a hostile one that sends anything to any route, counted in steps and turns.

`tests/worker/scheduling/test_step_shares.py` has simulated time. Here a router and a worker with a real engine show that nothing
before the scheduler lets the hostile client pass either. A step counts as long as a slow device would need, and connections are
left at events, not after a time. Memory is not short: large requests would take turns of 64 steps (`fair_preemption`).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import Phase, example, given, settings, strategies as st

from tests.cluster.engine_server import EngineServer, engine_server
from tests.how_many import num_examples
from transom_cluster.router.request_queue import MAX_PLACED_AT_ONCE
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepTimings

VICTIMS, HOSTILE, VICTIM_REST, NUM_REQUESTS = ("one", "two"), "hostile", (9,) * 18, 8
MAX_STEPS = 8  # from the arrival at the worker to the first token, and between tokens; a slot is claimed at once
MAX_PASSING = 8 * MAX_PLACED_AT_ONCE  # others' sequences that come to the worker after a request has come to the router


class Watch(SchedulerListener):
    """Counts what others get while a victim waits."""

    def begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.arrival = asyncio.Event()  # a hostile request has come to the router
        self.num_hostile = self.num_queued = self.num_steps = self.num_first = self.most_steps = self.most_passing = 0
        self.arrived: dict[int, int] = {}  # victim -> `num_queued` when its request came to the router
        self.since: dict[str, int] = {}  # a victim's request -> `num_steps` at its last token

    def note_arrivals(self, api: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            key = dict(scope.get("headers", ())).get(b"x-api-key", b"").decode()
            if key in VICTIMS:
                self.arrived[VICTIMS.index(key)] = self.num_queued
            elif key == HOSTILE:
                self.num_hostile += 1
                if not self.loop.is_closed():  # else the example has ended
                    self.loop.call_soon_threadsafe(self.arrival.set)
            await api(scope, receive, send)

        return call

    def queued(self, sequence: Sequence, *, num_ahead: int) -> None:
        if sequence.request.prompt_token_ids[2:] != VICTIM_REST:
            self.num_queued += 1
            return
        self.since[sequence.request.request_id] = self.num_steps
        passing = self.num_queued - self.arrived[sequence.request.prompt_token_ids[0]]
        self.most_passing = max(self.most_passing, passing)

    def count_steps(self, scheduler: Scheduler) -> None:
        receive = scheduler.receive

        def counting(result: Any) -> Any:
            plan = scheduler.steps_in_flight[0].plan
            rows = zip(plan.start, plan.count, strict=True)
            seconds = 15e-3 + sum(1.4e-3 + start * 1e-6 if num == 1 else num * 1e-3 for start, num in rows)
            result.timings = StepTimings(forward_s=seconds)
            self.num_steps += 1
            outputs = receive(result)
            for output in outputs:
                if (since := self.since.get(output.request_id)) is not None:
                    self.num_first += output.is_first
                    self.most_steps = max(self.most_steps, self.num_steps - since)
                    self.since[output.request_id] = self.num_steps
            return outputs

        scheduler.admission.listeners.append(self)
        scheduler.receive = counting  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[tuple[EngineServer, Watch]]:
    watch, keys = Watch(), {"api_keys": (*VICTIMS, HOSTILE)}
    sizes: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": "16MiB"}
    with engine_server(tiny_model, server=keys, wrap=watch.note_arrivals, max_waiting=512, **sizes) as server:
        watch.count_steps(server.replica.engine.scheduler)
        yield server, watch


def completion(num_tokens: int, num_prompts: int, max_tokens: int, form: dict[str, Any]) -> tuple[str, Any]:
    prompts = [[5 + i, *[7] * (num_tokens - 1)] for i in range(num_prompts)]
    return "/v1/completions", {"prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True, **form}


SEQUENCES, TEXT, PAGES = completion(40, 120, 60, {}), ("/tokenize", {"prompt": "\u1700" * 200_000}), ("/metrics", None)
GRAMMAR = {"structured_outputs": {"json": {"properties": {f"a{i}": {} for i in range(300)}}}}
forms = st.one_of(
    st.sampled_from([{}, GRAMMAR]),
    st.builds(lambda number: {"structured_outputs": {"regex": f"(a|b{number})+"}}, st.integers(0, 10**6)),
    st.builds(lambda width: {"kv_policy": {"type": "window", "sinks": 0, "window": width}}, st.integers(16, 500)),
)
chats = st.builds(lambda num: {"messages": [{"role": "user", "content": "a b " * num}]}, st.integers(1, 5000))
requests = st.one_of(
    st.builds(completion, st.integers(1, 200), st.sampled_from([1, 8, 60]), st.sampled_from([1, 20, 60]), forms),
    st.tuples(st.just("/v1/chat/completions"), chats),
    st.sampled_from([TEXT, PAGES, ("/debug/requests", None), ("/v1/completions", {"prompt": 5}), ("/nowhere", {})]),
)
# A request, how many connections send it again and again, and whether they leave it at the next arrival of a hostile request.
attacks = st.lists(st.tuples(requests, st.sampled_from([1, 4]), st.booleans()), min_size=1, max_size=5)


async def attack(client: httpx.AsyncClient, watch: Watch, path: str, body: Any, leaves: bool) -> None:
    while True:
        sent = asyncio.ensure_future(client.request("GET" if body is None else "POST", path, json=body))
        watch.arrival.clear()
        left = asyncio.ensure_future((watch.arrival if leaves else asyncio.Event()).wait())
        try:
            await asyncio.wait((sent, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sent.cancel()
            left.cancel()
            await asyncio.wait((sent, left))


async def victim(client: httpx.AsyncClient, number: int) -> None:
    for at in range(NUM_REQUESTS):
        sent = {"prompt": [number, 5 + at, *VICTIM_REST], "max_tokens": 8, "ignore_eos": True}
        (await client.post("/v1/completions", json=sent, headers={"x-api-key": VICTIMS[number]})).raise_for_status()


# Without `Phase.shrink`: a failure would be tried again for minutes.
@settings(max_examples=num_examples(3, 60), phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)
@given(sent=attacks)
@example(sent=[(SEQUENCES, 4, False), (TEXT, 2, False), (PAGES, 4, False)])
@example(sent=[(SEQUENCES, 2, True), (completion(1, 1, 20, GRAMMAR), 4, True)])
def test_no_client_passes_another_one_whatever_it_sends(served: tuple[EngineServer, Watch], sent: list[Any]) -> None:
    server, watch = served

    async def run() -> None:
        watch.begin()
        connections = [(*request, leaves) for request, num, leaves in sent for _ in range(num)]
        async with httpx.AsyncClient(base_url=server.url, headers={"x-api-key": HOSTILE}, timeout=600) as client:
            hostile = [asyncio.create_task(attack(client, watch, *one)) for one in connections]
            while watch.num_hostile < len(connections):
                await watch.arrival.wait()
                watch.arrival.clear()
            await asyncio.gather(*(victim(client, number) for number in range(len(VICTIMS))))
            for task in hostile:
                task.cancel()
            await asyncio.wait(hostile)
        await server.until_quiet()

    asyncio.run(run())
    assert watch.num_first == len(VICTIMS) * NUM_REQUESTS
    assert watch.most_steps <= MAX_STEPS
    assert watch.most_passing <= MAX_PASSING
