"""Losses, arrivals, drains and departures in any order: every client that stays gets its text once, of one model, and nothing is
left over."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cluster.conftest import make_router, num_in_flight, timings
from tests.cluster.stub_worker import StubDirectory, StubWorker
from tests.how_many import num_examples
from transom_cluster.router.eligibility import MODEL_GONE
from transom_core.config import FailoverConfig
from transom_core.contract import ErrorInfo, OutputEvent, Request, SamplingParams
from transom_core.errors import Overloaded, WorkerLost

NO_PAUSES = timings(
    first_reconnect_pause_s=0.0, longest_reconnect_pause_s=0.001, retry_s=0.001, cooldown_s=0.01, drain_s=0.001
)
TURNS_UNTIL_SEEN = 10  # of the event loop, from the directory's listing of a worker to the router's stream of it
ANY = st.data()


@dataclass
class Speaker(StubWorker):
    """Counts on from the letter of its model: "a", "A" or "0", which its identity begins with."""

    def event_of(self, request: Request, position: int, *, is_last: bool) -> OutputEvent:
        token_id = ord(self.identity[0]) + position
        return super().event_of(request, position, is_last=is_last)._replace(token_ids=(token_id,), text=chr(token_id))


class Cluster(RuleBasedStateMachine):
    """Hypothesis looks for an order of events that loses, repeats or leaks something. Every loss comes from outside, so no request
    is stopped for one."""

    models: tuple[str, ...] = ("a",)
    # No bounds: what is asked here is that nothing is lost or sent twice, however often workers are lost.
    failover = FailoverConfig(max_resumes=10**6, max_lost_workers=10**6, wait_s=600.0)
    max_losses = 10**6

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.workers: list[Speaker] = []
        self.answers: list[asyncio.Task] = []
        self.num_losses = 0
        self.numbers = itertools.count()
        self.num_turns = 0  # of the event loop
        self.listed_at: dict[str, int] = {}  # the turn, by worker
        self.directory = StubDirectory(self.new_worker(self.models[0]))
        self.router = make_router(directory=self.directory, failover=self.failover, timings=NO_PAUSES)
        self.on_loop(self.router.start)

    def new_worker(self, model: str) -> Speaker:
        number = len(self.workers)
        worker = Speaker(worker=f"w{number}", identity=model * 32, loaded_at_s=float(number), num_turns=number % 3 + 1)
        self.workers.append(worker)
        self.listed_at[worker.worker] = self.num_turns
        return worker

    def models_of(self, name: str) -> set[str]:
        """The identities of workers that were sent a request of the client `name`."""
        return {
            worker.identity
            for worker in self.workers
            if any(request.request_id.startswith(f"{name}-") for request in worker.submitted)
        }

    def has_worker_of(self, identity: str) -> bool:
        """Whether a worker of this identity lives and is listed, and the router has had time to see it."""
        return any(
            worker.identity == identity and self.num_turns - self.listed_at[worker.worker] > TURNS_UNTIL_SEEN
            for worker in self.directory.workers.values()
            if not worker.is_dead
        )

    def alive(self) -> list[Speaker]:
        return [worker for worker in self.workers if not worker.is_dead]

    def on_loop(self, action: Callable[[], object], num_turns: int = 1) -> None:
        async def act() -> None:
            action()
            for _ in range(num_turns):
                await asyncio.sleep(0)
                self.num_turns += 1

        self.runner.run(act())

    @initialize(num=st.integers(0, 2), data=ANY)
    def start_with(self, num: int, data: st.DataObject) -> None:
        for _ in range(num):
            self.arrive(data)

    async def read(self, name: str, max_tokens: int, num_choices: int) -> None:
        """A client that checks every event: none missing, none twice, all of the model that the answer names."""
        params = SamplingParams(max_tokens=max_tokens)
        requests = [
            Request(request_id=f"{name}-{i}", prompt_token_ids=(1, 2), params=params, seed=0, choice_index=i)
            for i in range(num_choices)
        ]
        texts, is_done = [""] * num_choices, [False] * num_choices
        try:
            async with self.router.generate(requests) as output:
                while output.num_unfinished:
                    for index, event in await output.next():
                        if event.error is not None:
                            raise event.error.error()
                        assert not is_done[index]
                        assert event.position == event.text_offset == len(texts[index])
                        texts[index] += event.text
                        is_done[index] = event.finish_reason is not None
        except Overloaded:
            return  # all were full when it came
        except WorkerLost as error:
            if str(error) != MODEL_GONE or all(self.has_worker_of(model) for model in self.models_of(name)):
                raise
            return
        assert output.identity is not None
        assert texts == ["".join(chr(ord(output.identity[0]) + i) for i in range(max_tokens))] * num_choices

    @rule(num_turns=st.integers(1, 30))
    def go_on(self, num_turns: int) -> None:
        self.on_loop(lambda: None, num_turns)

    @rule(max_tokens=st.integers(1, 26), num_choices=st.integers(1, 3))
    def ask(self, max_tokens: int, num_choices: int) -> None:
        def send() -> None:
            self.answers.append(asyncio.create_task(self.read(f"r{next(self.numbers)}", max_tokens, num_choices)))

        self.on_loop(send)

    @precondition(lambda self: self.answers)
    @rule(data=ANY)
    def leave(self, data: st.DataObject) -> None:
        answer = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        self.on_loop(answer.cancel)

    @rule(data=ANY)
    def arrive(self, data: st.DataObject) -> None:
        worker = self.new_worker(data.draw(st.sampled_from(self.models)))
        self.on_loop(lambda: self.directory.add(worker))

    @precondition(lambda self: self.alive() and self.num_losses < self.max_losses)
    @rule(data=ANY, how=st.sampled_from(["stream", "worker", "host", "ranks"]))
    def lose(self, data: st.DataObject, how: str) -> None:
        """Break a stream, kill a worker or a host with two of them, or lose the ranks of a worker, which then starts them again."""
        self.num_losses += 1
        worker, other = (data.draw(st.sampled_from(self.alive())) for _ in range(2))
        if how == "host":
            self.on_loop(lambda: worker.kill("host_lost"), num_turns=0)
            self.on_loop(lambda: other.kill("host_lost"))
        elif how == "ranks":
            lost = ErrorInfo.of(WorkerLost("It lost a rank.", loss_cause="killed", num_lost=worker.num_running))
            worker.admission_error = lost
            self.on_loop(lambda: worker.end_all(lost))
        else:
            self.on_loop(worker.die if how == "stream" and worker.num_streams else worker.kill)

    @precondition(lambda self: any(worker.admission_error for worker in self.workers))
    @rule()
    def restart_ranks(self) -> None:
        for worker in self.workers:
            worker.admission_error = None

    @precondition(lambda self: self.directory.workers)
    @rule(data=ANY)
    def disappear(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.directory.workers)))
        self.on_loop(lambda: self.directory.remove(self.directory.workers[worker_id]))

    @precondition(lambda self: self.alive())
    @rule(data=ANY, max_running=st.one_of(st.none(), st.integers(1, 3)))
    def fill(self, data: st.DataObject, max_running: int | None) -> None:
        data.draw(st.sampled_from(self.alive())).max_running = max_running

    @invariant()
    def no_request_is_at_two_workers(self) -> None:
        ids = [one for connection in self.router.connections.values() for one in connection.in_flight.request_ids]
        assert len({one.split("+")[0] for one in ids}) == len(ids)

    def teardown(self) -> None:
        async def finish() -> None:
            self.restart_ranks()
            for worker in self.workers:
                worker.max_running = None
                if worker.is_dead and worker.worker in self.directory.workers:
                    self.directory.remove(worker)  # while it is listed, requests of its model wait for it
            self.directory.add(self.new_worker(self.models[-1]))
            async with asyncio.timeout(120):
                await asyncio.gather(*self.answers)
            connected = [one for one in self.alive() if one.worker in self.router.connections]
            for _ in range(50):
                await asyncio.sleep(0)
            assert num_in_flight(self.router) == len(self.router.queue) == 0
            assert not any(worker.num_running for worker in connected)
            assert 'judgement="culprit",model="stub",router="r0"} 0.0' in self.router.metrics.text()

        try:
            self.runner.run(finish())
        finally:
            self.runner.run(self.router.stop())
            self.runner.close()


class ClusterOfModels(Cluster):
    """Workers of three models: an answer is of one of them, or ends because its model is gone."""

    models = ("a", "A", "0")


class FewLosses(Cluster):
    """With the usual bounds, four losses from outside cost no stream."""

    failover = FailoverConfig(wait_s=600.0)
    max_losses = 4


TestCluster, TestClusterOfModels, TestFewLosses = Cluster.TestCase, ClusterOfModels.TestCase, FewLosses.TestCase
TestCluster.settings = TestClusterOfModels.settings = TestFewLosses.settings = settings(
    max_examples=num_examples(20, 100), stateful_step_count=40, deadline=None
)
