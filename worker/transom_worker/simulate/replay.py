"""`Replay`: runs a workload through the real scheduler and KV cache, with a stub executor instead of a model.

It does what a worker's engine does: it adds requests when they arrive, runs the steps that the scheduler plans, and ends requests.
Times are those of a virtual clock, which advances by the time that each step would take on a real GPU. So the requests of a
recorded trace overlap about as much as they did when they were recorded:

    while requests will arrive or the scheduler has work:
        add the requests that have arrived
        plan = scheduler.schedule(); advance the clock by the plan's cost
        scheduler.receive(stub executor's answer to plan); end the requests that are complete
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import fmean
from time import perf_counter

from transom_core.errors import RequestError
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepResult
from transom_worker.simulate.outcome import Report
from transom_worker.simulate.workload import Run, SimulatedRequest, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The duration of a step: a fixed part, and a part per computed token. The defaults suit a 20B model on one large GPU.

    Example: with the defaults a step of 2,000 tokens takes 0.008 + 2,000 * 0.00002 = 0.048 s.
    Loads from the host tier run at `load_bytes_per_s` while the step computes; the longer of the two counts.
    """

    step_s: float = 0.008
    token_s: float = 0.00002
    load_bytes_per_s: float = 16 * 2**30

    def of(self, plan: StepPlan, block_bytes: Sequence[int] = ()) -> float:
        """Return the seconds that a plan takes; `block_bytes` has, by group, the bytes of a block that is loaded."""
        loads = zip(plan.copy_group, plan.copy_ticket, strict=False)
        load_bytes = sum(block_bytes[group] for group, ticket in loads if ticket > 0)
        return max(self.step_s + self.token_s * plan.num_tokens, load_bytes / self.load_bytes_per_s)


class VirtualClock:
    """Seconds since the workload's beginning. It is callable, so that it can serve as the cache's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Advance the clock by this many seconds."""
        self.now_s += seconds

    def wait_until(self, moment_s: float) -> None:
        """Advance the clock to a moment, if it is in the future."""
        self.now_s = max(self.now_s, moment_s)


class Arrivals:
    """Requests arrive at their recorded times, but not earlier than `pause_s` after the end of the request that `after` names.

    Example: a turn is recorded at second 10, and the previous turn's answer ends at second 12. The turn arrives at second 12, or
    at second 14 if its pause is 2 seconds.
    """

    def __init__(self, workload: Workload) -> None:
        self._requests = workload.requests
        self._successors: dict[int, list[int]] = defaultdict(list)
        self._ready: list[tuple[float, int]] = []  # heap
        for index, request in enumerate(workload.requests):
            if request.after is None:
                heappush(self._ready, (request.arrival_s, index))
            else:
                self._successors[request.after].append(index)

    def due(self, now_s: float) -> Iterator[int]:
        """Yield the indices of requests that arrive at `now_s` or arrived before."""
        while self._ready and self._ready[0][0] <= now_s:
            yield heappop(self._ready)[1]

    def next_s(self) -> float | None:
        """Return when the next request arrives; None if none is left, or all that are left wait for an answer."""
        return self._ready[0][0] if self._ready else None

    def answered(self, index: int, now_s: float) -> None:
        """Note that a request has ended or was refused: the requests that come after it may arrive."""
        for successor in self._successors.pop(index, ()):
            request = self._requests[successor]
            heappush(self._ready, (max(now_s + request.pause_s, request.arrival_s), successor))


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
        self._scheduler = scheduler
        self._requests = workload.requests
        self._arrivals = Arrivals(workload)
        self._cost = cost
        self._clock = clock
        self._cache_salt = cache_salt
        self._executor = StubExecutor()
        self._fragmentation: list[float] = []  # one sample at each request's end
        self._num_served = self._num_ended = self._num_steps = self._num_output_tokens = self._num_host_tokens = 0
        self._block_bytes = [group.stride_bytes for group in scheduler.cache.layout.groups]

    def run(self, on_progress: OnProgress = lambda num_ended: None) -> Report:
        """Serve all requests; return the counts."""
        begin_s = perf_counter()
        while self._admit_arrivals(on_progress) or self._scheduler.has_work:
            self._step(on_progress)
        return Report(
            requests=self._num_served,
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
        self._num_served += 1
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
