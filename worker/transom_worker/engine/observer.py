"""What the engine tells of requests and steps as they happen: to its metrics, and to whoever else wants to know.

Called on the engine's thread, several times a step: nothing here may wait or raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transom_worker.blockmap.log import BlockMapLog
from transom_worker.contract import WorkerLoad
from transom_worker.engine.running_request import RunningRequest
from transom_worker.errors import Overloaded, RequestError, WorkerLost
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import NewSequence, StepPlan, StepTimings
from transom_worker.telemetry.engine_timelines import EngineTimelines
from transom_worker.telemetry.metrics import EngineMetrics, WorkerState

if TYPE_CHECKING:
    from transom_worker.execution.executor import RankReport

HEADROOM_LENGTHS = (1024, 8192)
REFUSED = ((Overloaded, "overloaded"), (WorkerLost, "worker_unavailable"), (RequestError, "request_refused"))


class StepTimes(NamedTuple):
    """Seconds of one step outside the ranks: until its plan was out, until its result was in, until its events were made."""

    schedule_s: float
    wait_s: float
    output_s: float


class EngineObserver:
    """One engine's. Requests come as the engine knows them."""

    def __init__(self, metrics: EngineMetrics, worker: str = "0") -> None:
        self.metrics = metrics
        self.timelines = EngineTimelines(worker)
        self.blocks = BlockMapLog()
        self._unscheduled: dict[str, RunningRequest] = {}  # those that no step has computed yet

    def added(self, running: RunningRequest) -> None:
        """A request waits in the queue from now on."""
        self._unscheduled[running.request.request_id] = running
        self.blocks.changed()

    def refused(self, error: Exception) -> None:
        """A request was not taken."""
        self.metrics.refused(next((reason for kind, reason in REFUSED if isinstance(error, kind)), "internal_error"))

    def introduced(self, running: RunningRequest, new: NewSequence) -> None:
        """A plan computes tokens of a request that held no blocks before: for the first time, or again after a preemption."""
        self._unscheduled.pop(new.request_id, None)
        if not running.times.scheduled_s:
            self.metrics.admitted(running.times, num_prompt_tokens=new.num_prompt_tokens)

    def scheduled(self, plan: StepPlan) -> None:
        """A plan went to the ranks."""
        self.blocks.changed()
        self.timelines.scheduled(plan)
        self.metrics.scheduled(num_tokens=plan.num_tokens, num_seqs=len(plan.seq_ids))

    def stepped(self, timings: StepTimings, times: StepTimes) -> None:
        """A result came back, and its events are made."""
        self.blocks.changed()
        self.timelines.stepped()
        self.metrics.stepped(timings, schedule_s=times.schedule_s, wait_s=times.wait_s, output_s=times.output_s)

    def token(self, running: RunningRequest, output: SequenceOutput, now_s: float) -> None:
        """A request got a token."""
        if output.is_first:
            self.timelines.first_token(output.request_id, now_s)
        self.metrics.token(running.times, now_s)

    def finished(self, running: RunningRequest, finish_reason: str) -> None:
        """A request ended: stop, length, abort or error."""
        self._unscheduled.pop(running.request.request_id, None)
        self.blocks.changed()
        self.blocks.events.finished(running.request.request_id, finish_reason)
        self.timelines.finished(running.request.request_id, finish_reason)
        self.metrics.finished(running.times, finish_reason, num_output_tokens=running.num_output_tokens)

    def ranks_lost(self) -> None:
        """A rank was lost, and all of them are started again."""
        self.blocks.changed()
        self.timelines.ranks_lost()
        self.metrics.rank_lost()

    def published(self, scheduler: Scheduler, load: WorkerLoad, ranks: tuple[RankReport, ...]) -> None:
        """A few times a second, and when the engine rests: the state of queue, cache and ranks."""
        self.timelines.split_long_phases()
        self.blocks.published(scheduler.cache)
        self.metrics.publish(
            WorkerState(
                stats=scheduler.stats(),
                load=load,
                work=scheduler.work.copy(),
                preemptions=scheduler.preemptions,
                preempted_tokens=scheduler.preempted_tokens,
                headroom=_headroom(scheduler),
                ranks=ranks,
                oldest_waiting_s=min((one.times.arrival_s for one in self._unscheduled.values()), default=0.0),
            )
        )


def _headroom(scheduler: Scheduler) -> dict[str, int]:
    """Requests that could start now, by their length."""
    longest = scheduler.max_model_len
    lengths = {str(length): length for length in HEADROOM_LENGTHS if length <= longest} | {"max": longest}
    return {name: scheduler.cache.capacity.num_that_fit(length) for name, length in lengths.items()}
