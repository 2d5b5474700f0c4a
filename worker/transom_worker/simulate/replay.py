"""`Replay`: runs a workload through the real scheduler and KV cache, with a stub executor instead of a model.

It does what a worker's engine does: it adds requests when they arrive, runs the steps that the scheduler plans, and ends requests.
Times are those of a virtual clock:

    while requests will arrive or the scheduler has work:
        add the requests that have arrived
        plan = scheduler.schedule(); advance the clock by the plan's cost
        scheduler.receive(stub executor's answer to plan); end the requests that are complete
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import fmean
from time import perf_counter

from transom_core.errors import RequestError
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepResult
from transom_worker.simulate.outcome import Counts
from transom_worker.simulate.virtual_time import Arrivals, StepCost, VirtualClock
from transom_worker.simulate.workload import Run, SimulatedRequest, Workload

OnProgress = Callable[[int], None]  # called with the number of requests that have ended


class StubExecutor:
    """Stands for a model: if a step samples a token, it returns the next token of the request's known answer.

    It follows the plans' new and finished sequences, as a rank does.
    """

    def __init__(self) -> None:
        self._answers: dict[str, Run] = {}
        # seq_id -> offset: an answer's ids are consecutive, so its token at a position of the sequence has id offset + position.
        self._id_offset: dict[int, int] = {}

    def expect(self, request_id: str, answer: Run) -> None:
        """Set a request's answer."""
        self._answers[request_id] = answer

    def forget(self, request_id: str) -> None:
        """Remove the answer of a request that has ended."""
        del self._answers[request_id]

    def answer(self, plan: StepPlan) -> StepResult:
        """Return a result with one token per sampling row, which reports the plan's loads from the host tier as complete."""
        id_offset = self._id_offset
        for seq_id in plan.finished:
            id_offset.pop(seq_id, None)
        for new in plan.new_sequences:
            id_offset[new.seq_id] = self._answers[new.request_id].first_token - new.num_prompt_tokens
        rows = zip(plan.seq_ids, plan.start, plan.count, plan.sample, strict=True)
        sampled = [id_offset[seq_id] + start + count for seq_id, start, count, samples in rows if samples]
        loaded = sorted({ticket for ticket in plan.copy_ticket if ticket > 0})
        return StepResult(step_id=plan.step_id, sampled_ids=sampled, loaded=loaded, load_s=[0.0] * len(loaded))


class Replay:
    """Replays one workload. Each request ends at its recorded answer's length, unless the scheduler refuses it when it arrives.

    All requests have the same `cache_salt`, so they share prefixes; another salt changes only the blocks' digests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workload: Workload,
        *,
        cost: StepCost,
        clock: VirtualClock,
        cache_salt: str | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self.served: list[int] = []  # in order of arrival
        self._scheduler = scheduler
        self._requests = workload.requests
        self._arrivals = Arrivals(workload)
        self._cost = cost
        self._clock = clock
        self._cache_salt = cache_salt
        self._executor = StubExecutor()
        self._fragmentation: list[float] = []  # one sample at each request's end
        self._num_ended = self._num_steps = self._num_output_tokens = self._num_host_tokens = 0
        self._block_bytes = [group.stride_bytes for group in scheduler.cache.layout.groups]

    def run(self, on_progress: OnProgress = lambda num_ended: None) -> Counts:
        """Serve all requests; return the counts."""
        begin_s = perf_counter()
        while self._admit_arrivals(on_progress) or self._scheduler.has_work:
            self._step(on_progress)
        return Counts(
            requests=len(self.served),
            refused=dict(self.refused),
            output_tokens=self._num_output_tokens,
            host_tokens=self._num_host_tokens,
            steps=self._num_steps,
            preemptions=sum(self._scheduler.work.preemptions.values()),
            fragmentation=fmean(self._fragmentation or [0.0]),
            cache=self._scheduler.stats(),
            seconds=perf_counter() - begin_s,
            virtual_seconds=self._clock.now_s,
        )

    def _admit_arrivals(self, on_progress: OnProgress) -> bool:
        """Add the requests that have arrived; return whether more will arrive."""
        next_s = self._arrivals.next_s()
        if next_s is not None and not self._scheduler.has_work:
            self._clock.wait_until(next_s)
        for index in self._arrivals.due(self._clock.now_s):
            if not self._add(index, self._requests[index]):
                self._end(index, on_progress)
        return self._arrivals.next_s() is not None

    def _add(self, index: int, simulated: SimulatedRequest) -> bool:
        """Add a request to the scheduler; return whether the scheduler accepts it."""
        name = str(index)
        try:
            self._scheduler.add(simulated.as_request(name, cache_salt=self._cache_salt))
        except RequestError as error:
            self.refused[type(error).__name__] += 1
            return False
        self.served.append(index)
        self._executor.expect(name, simulated.answer)
        return True

    def _step(self, on_progress: OnProgress) -> None:
        """Run one step, if any request can compute a token, and end the requests whose answers are complete."""
        plan = self._scheduler.schedule()
        if plan is None:  # every remaining request was refused, or arrives later
            assert not self._scheduler.has_work
            return
        self._num_steps += 1
        self._clock.advance(self._cost.of(plan, self._block_bytes))
        outputs = self._scheduler.receive(self._executor.answer(plan))
        self._num_output_tokens += len(outputs)
        for output in outputs:
            if output.is_first:
                self._num_host_tokens += output.num_host_tokens
            if output.at_limit:
                self._fragmentation.append(self._scheduler.stats().fragmentation)
                self._scheduler.abort(output.request_id)
                self._executor.forget(output.request_id)
                self._end(int(output.request_id), on_progress)

    def _end(self, index: int, on_progress: OnProgress) -> None:
        """Note that a request has ended or was refused."""
        self._arrivals.answered(index, self._clock.now_s)
        self._num_ended += 1
        on_progress(self._num_ended)
