"""Deaths, arrivals, drains and departures in any order: every client that stays gets its text once, and nothing is left over."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cluster.conftest import make_router, num_in_flight, timings
from tests.cluster.stub_worker import StubDirectory, StubWorker
from transom_cluster.router.router import Router
from transom_core.config import FailoverConfig
from transom_core.contract import Request, SamplingParams
from transom_core.errors import Overloaded

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# No bounds: what is asked here is that nothing is lost or sent twice, however often workers are lost.
UNBOUNDED = FailoverConfig(max_resumes=10**6, max_lost_workers=10**6, wait_s=600.0)
NO_PAUSES = timings(first_reconnect_pause_s=0.0, longest_reconnect_pause_s=0.001, retry_s=0.001)


def one_request(request_id: str, max_tokens: int, choice_index: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=request_id, prompt_token_ids=(1, 2), params=params, seed=0, choice_index=choice_index)


async def check_nothing_is_left(router: Router, workers: list[StubWorker]) -> None:
    for _ in range(50):
        await asyncio.sleep(0)
    assert num_in_flight(router) == len(router.queue) == 0
    assert [worker.num_running for worker in workers] == [0] * len(workers)


class Cluster(RuleBasedStateMachine):
    """Hypothesis looks for an order of events that loses, repeats or leaks something."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.workers: list[StubWorker] = []
        self.answers: list[asyncio.Task] = []
        self.numbers = itertools.count()
        self.directory = StubDirectory(self.new_worker())
        self.router = make_router(directory=self.directory, failover=UNBOUNDED, timings=NO_PAUSES)
        self.on_loop(self.router.start)

    def new_worker(self) -> StubWorker:
        self.workers.append(StubWorker(worker=f"w{len(self.workers)}", num_turns=len(self.workers) % 3 + 1))
        return self.workers[-1]

    def alive(self) -> list[StubWorker]:
        return [worker for worker in self.workers if not worker.is_dead]

    def on_loop(self, action: Callable[[], object], num_turns: int = 1) -> None:
        async def act() -> None:
            action()
            for _ in range(num_turns):
                await asyncio.sleep(0)

        self.runner.run(act())

    @initialize(num=st.integers(0, 2))
    def start_with(self, num: int) -> None:
        for _ in range(num):
            self.arrive()

    async def read(self, name: str, max_tokens: int, num_choices: int) -> None:
        """A client that checks every event: none missing, none twice."""
        requests = [one_request(f"{name}-{i}", max_tokens, i) for i in range(num_choices)]
        texts, is_done = [""] * num_choices, [False] * num_choices
        try:
            async with self.router.generate(requests) as output:
                while output.num_unfinished:
                    for index, event in await output.next():
                        assert event.error is None
                        assert not is_done[index]
                        assert event.position == event.text_offset == len(texts[index])
                        texts[index] += event.text
                        is_done[index] = event.finish_reason is not None
        except Overloaded:
            return  # all were full when it came
        assert texts == [LETTERS[:max_tokens]] * num_choices

    @rule(num_turns=st.integers(1, 30))
    def go_on(self, num_turns: int) -> None:
        self.on_loop(lambda: None, num_turns)

    @rule(max_tokens=st.integers(1, 26), num_choices=st.integers(1, 3))
    def ask(self, max_tokens: int, num_choices: int) -> None:
        def send() -> None:
            answer = asyncio.create_task(self.read(f"r{next(self.numbers)}", max_tokens, num_choices))
            self.answers.append(answer)

        self.on_loop(send)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        answer = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        self.on_loop(answer.cancel)

    @rule()
    def arrive(self) -> None:
        self.on_loop(lambda: self.directory.add(self.new_worker()))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), is_for_good=st.booleans())
    def lose(self, data: st.DataObject, is_for_good: bool) -> None:
        worker = data.draw(st.sampled_from(self.alive()))
        if is_for_good or not worker.num_streams:
            self.on_loop(worker.kill)
        else:
            self.on_loop(worker.die)

    @precondition(lambda self: self.directory.workers)
    @rule(data=st.data())
    def disappear(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.directory.workers)))
        self.on_loop(lambda: self.directory.remove(self.directory.workers[worker_id]))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), max_running=st.one_of(st.none(), st.integers(1, 3)))
    def fill(self, data: st.DataObject, max_running: int | None) -> None:
        data.draw(st.sampled_from(self.alive())).max_running = max_running

    @invariant()
    def no_request_is_at_two_workers(self) -> None:
        ids = [one for connection in self.router.connections.values() for one in connection.in_flight.request_ids]
        assert len({one.split("+")[0] for one in ids}) == len(ids)

    def connected(self) -> list[StubWorker]:
        return [worker for worker in self.alive() if worker.worker in self.router.connections]

    def teardown(self) -> None:
        async def finish() -> None:
            for worker in self.workers:
                worker.max_running = None
            self.directory.add(self.new_worker())
            async with asyncio.timeout(120):
                await asyncio.gather(*self.answers)
            await check_nothing_is_left(self.router, self.connected())

        try:
            self.runner.run(finish())
        finally:
            self.runner.run(self.router.stop())
            self.runner.close()


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
