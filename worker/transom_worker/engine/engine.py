"""The step loop of one worker: requests in, output events out. Synchronous; knows neither ray nor threads.

One step: schedule up to `steps_in_flight` plans, wait for the oldest result, publish and free through the scheduler, push
each new token through its `Answer` (text, stops), and return the events. `EngineThread` runs it beside an event loop.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from transom_worker.config import EngineConfig
from transom_worker.contract import OutputEvent, Request, WorkerLoad
from transom_worker.engine.load_report import worker_load
from transom_worker.engine.observer import EngineObserver, StepTimes
from transom_worker.engine.output import Answer
from transom_worker.engine.running_request import RunningRequest
from transom_worker.engine.step_pipeline import StepPipeline
from transom_worker.engine.step_rates import StepRates
from transom_worker.errors import EngineDead, RankLost, RequestError, RequestTimeout, WorkerLost
from transom_worker.execution.executor import Executor, ExecutorInfo
from transom_worker.kvcache.events import CacheShape, KvUpdate
from transom_worker.kvcache.stats import CacheStats
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.request_validation import check_request, fit_model_len
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan
from transom_worker.telemetry.metrics import EngineMetrics
from transom_worker.text.tokenizer import Tokenizer

logger = logging.getLogger("transom.worker")

STATS_PERIOD_S = 0.25
RESTARTING = "The worker lost a rank and starts its ranks again; try again in a moment."


class Engine:
    """One worker's engine. Not thread-safe: one thread calls it."""

    def __init__(
        self, config: EngineConfig, executor: Executor, tokenizer: Tokenizer, metrics: EngineMetrics, worker: str = "0"
    ) -> None:
        """Starts the executor; where that or anything after it raises, `build_engine` shuts it down."""
        self.config = config
        self.tokenizer = tokenizer
        self.observer = EngineObserver(metrics, worker)
        self._executor = executor
        info = executor.start()
        self._eos_token_ids = frozenset(info.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
        self._scheduler = self._make_scheduler(info)
        self._scheduler.listen(self.observer.timelines)
        self._scheduler.listen(self.observer.blocks.events)
        self._scheduler.max_model_len = fit_model_len(
            self._scheduler.capacity_tokens, info.max_model_len, is_asked=config.model.max_model_len is not None
        )
        self.info: ExecutorInfo = replace(info, max_model_len=self._scheduler.max_model_len)
        self._pipeline = StepPipeline(self._scheduler, executor, steps_in_flight=config.scheduler.steps_in_flight)
        self._answers: dict[str, RunningRequest] = {}
        self._deadlines: list[tuple[float, str]] = []
        self.forward_s = 0.0  # in the ranks' forward passes, since start
        self._ready: list[OutputEvent] = []
        self.report = ""  # for people: where the memory went
        self._dead: Exception | None = None
        self._rates = StepRates()
        self.is_restarting = False  # ranks were lost and are being started again; read from any thread
        self._stats_at_s = 0.0
        self.metrics.started(config, self.info)
        self._publish_stats()

    @property
    def metrics(self) -> EngineMetrics:
        """What `/metrics` shows of this engine."""
        return self.observer.metrics

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        if self._dead is not None:
            return bool(self._ready)
        return bool(self._answers or self._ready or self._pipeline.is_busy or self.is_restarting or self._executor.lost)

    @property
    def cache_shape(self) -> CacheShape:
        """What a mirror of the prefix index needs to search as this engine does."""
        return self._scheduler.cache.shape

    def take_kv_update(self) -> KvUpdate | None:
        """What became findable or was evicted since the last call; feeds a router's mirror of the prefix index."""
        return self._scheduler.cache.take_update()

    def whole_kv_index(self) -> KvUpdate:
        """All that can be found now, for a mirror that begins."""
        return self._scheduler.cache.whole_index()

    def load(self) -> WorkerLoad:
        """What there is to do, for whoever chooses among workers."""
        return worker_load(self._scheduler, self._rates)

    @property
    def scheduler(self) -> Scheduler:
        """For who looks at single blocks; only from the engine's thread."""
        return self._scheduler

    def stats(self) -> CacheStats:
        """The cache's state now; only from the engine's thread, or when idle."""
        return self._scheduler.stats()

    @property
    def num_preemptions(self) -> int:
        """Preemptions since start."""
        return sum(self._scheduler.preemptions.values())

    def add(self, request: Request) -> None:
        """Take one request; its events come out of `step`.

        Raises:
            RequestError: wrong, too long, too large or a duplicate id.  Overloaded: the queue is full.
            WorkerLost: ranks are being started again.  EngineDead: an earlier step failed.
        """
        if self._dead is not None:
            raise EngineDead(f"The worker's engine has ended: {self._dead}")
        if self.is_restarting:
            raise WorkerLost(RESTARTING)
        check_request(request, vocab_size=self.info.vocab_size)
        if request.request_id in self._answers:
            raise RequestError(f"Request id {request.request_id!r} is already running; ids must be unique.")
        answer = Answer(
            request, self.tokenizer, eos_token_ids=self._eos_token_ids, max_model_len=self.info.max_model_len
        )
        running = RunningRequest(answer)
        if answer.finished is not None:
            self._ready.append(running.end_event(answer.finished))
            return
        self._scheduler.add(request)
        self._answers[request.request_id] = running
        self.observer.added(running)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once; no event follows. False if it is not running."""
        running = self._answers.pop(request_id, None)
        if running is None:
            return False
        self._scheduler.abort(request_id)
        self.observer.finished(running, "abort")
        self._publish_stats()
        return True

    def fail(self, reason: Exception) -> list[OutputEvent]:
        """End the engine: `add` refuses from now on, and every request gets an error event, with which it can go on elsewhere."""
        self._dead = self._dead or reason
        self.is_restarting = False
        self._pipeline.forget()
        told = reason if isinstance(reason, WorkerLost) else EngineDead(f"The worker's engine has ended: {reason}")
        return [self._error_event(request_id, told) for request_id in list(self._answers)]

    def step(self) -> list[OutputEvent]:
        """Run until one result has arrived, or nothing can run; return the events of that step.

        A failing step ends the engine: every request gets an error event, and `add` refuses from then on. When a rank is lost
        every request gets an error event that lets it go on elsewhere, and the next call starts all ranks again. An interrupt
        (Ctrl-C in offline use) passes through and costs the requests in flight alone.
        """
        events, self._ready = self._ready, []
        events += self._expire()
        if self._dead is not None:
            return events
        try:
            if self.is_restarting:
                self._restart()
            self._step(events)
        except RankLost as error:
            events += self._lose_ranks(error)
        except Exception as error:  # whatever an executor raises ends this engine, never its requests' answers
            events += self.fail(error)
        except BaseException:
            self._drop_in_flight()
            raise
        return events

    @property
    def dead(self) -> Exception | None:
        """What ended the engine, if anything did."""
        return self._dead

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on any thread, when a rank ends by itself: there is work then."""
        self._executor.on_lost(callback)

    def interrupt(self) -> None:
        """Have a restart that is under way, or about to begin, fail soon; from any thread. `shutdown` follows."""
        if self.is_restarting:
            self._executor.interrupt()

    def shutdown(self) -> None:
        """Free the executor's memory and processes; idempotent."""
        self._executor.shutdown()
        self.observer.timelines.close()

    def _step(self, events: list[OutputEvent]) -> None:
        """One step; its events are added one by one, so that none is lost when a later one fails."""
        begin_s = time.perf_counter()
        self._executor.check()
        for plan in self._pipeline.fill():
            self._scheduled(plan)
        if not self._pipeline.is_busy:
            self._publish_stats()
            return
        scheduled_s = time.perf_counter()
        done = self._pipeline.receive()
        self.forward_s += done.timings.forward_s
        self._rates.stepped(done.num_tokens, done.num_seqs, done.received_s - begin_s)
        now_s = time.time()
        for output in done.outputs:
            if output.request_id in self._answers:
                events.append(self._advance(output, now_s))
        end_s = time.perf_counter()
        times = StepTimes(scheduled_s - begin_s, done.received_s - scheduled_s, end_s - done.received_s)
        self.observer.stepped(done.timings, times)
        if end_s - self._stats_at_s > STATS_PERIOD_S or not self._answers:
            self._publish_stats()

    def _lose_ranks(self, error: RankLost) -> list[OutputEvent]:
        """Nothing that the ranks held is left: every request has to go on elsewhere, or here after the restart."""
        if self.is_restarting:  # again, while starting: there is no point in a third attempt
            return self.fail(error)
        logger.error("A rank was lost (%s); starting all ranks again.", error)
        self.is_restarting = True
        self.observer.ranks_lost()
        self._pipeline.forget()
        self._scheduler.reset()
        lost = WorkerLost(f"The worker lost a rank: {error}")
        return [self._error_event(request_id, lost) for request_id in list(self._answers)]

    def _restart(self) -> None:
        begin_s = time.perf_counter()
        self._executor.restart()
        self.is_restarting = False
        logger.info("All ranks run again after %.1f s.", time.perf_counter() - begin_s)
        self._publish_stats()

    def _make_scheduler(self, info: ExecutorInfo) -> Scheduler:
        return Scheduler(
            self.config.scheduler,
            info.layout,
            block_size=self.config.cache.block_size,
            max_model_len=info.max_model_len,
            enable_prefix_caching=self.config.cache.enable_prefix_caching,
            window_repair=self.config.cache.window_repair,
        )

    def _scheduled(self, plan: StepPlan) -> None:
        """Count a plan, and the requests that it computes for the first time."""
        self.observer.scheduled(plan)
        for new in plan.new_sequences:
            self.observer.introduced(self._answers[new.request_id], new)

    def _drop_in_flight(self) -> None:
        """A step was interrupted: forget all plans in flight, with the requests that they computed."""
        for request_id in self._pipeline.drop():
            if running := self._answers.pop(request_id, None):
                self.observer.finished(running, "abort")
        self._publish_stats()

    def _advance(self, output: SequenceOutput, now_s: float) -> OutputEvent:
        running = self._answers[output.request_id]
        event = running.token_event(output)
        if output.is_first:
            self._rates.first_token(max(0.0, now_s - running.times.arrival_s))
        self.observer.token(running, output, now_s)
        if event.finish_reason is not None:
            self._scheduler.finish(output.request_id)
            del self._answers[output.request_id]
            self.observer.finished(running, event.finish_reason)
        return event

    def _expire(self) -> list[OutputEvent]:
        """Error events of requests whose deadline has passed."""
        events: list[OutputEvent] = []
        now_s = time.time()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            running = self._answers.get(request_id)
            if running is not None and running.request.deadline_s == deadline_s:
                self._scheduler.abort(request_id)
                events.append(self._error_event(request_id, RequestTimeout("The request's deadline has passed.")))
        return events

    def _error_event(self, request_id: str, error: Exception) -> OutputEvent:
        running = self._answers.pop(request_id)
        self.observer.finished(running, "error")
        return running.error_event(error)

    def _publish_stats(self) -> None:
        self._stats_at_s = time.perf_counter()
        self.observer.published(self._scheduler, self.load(), self._executor.rank_reports())
