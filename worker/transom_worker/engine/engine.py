"""`Engine`: the step loop of one worker: requests in, output events out.

One step: the scheduler plans, the executor's ranks compute the plan, the scheduler applies the result, and each new token
becomes an output event of its request. The loop is synchronous and knows neither Ray nor threads; `EngineThread` runs it beside
an event loop.

- **output event**: what one step added to one request: a token, final text, and the finish reason with the last one.
- **rank**: a process (or this one) that computes a shard of the model; the executor hides how many there are.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from transom_core.clock import steady_time_s
from transom_core.config import EngineConfig
from transom_core.contract import Adapter, OutputEvent, PauseMode, Request, WorkerLoad
from transom_core.errors import (
    EngineDead,
    OutOfMemory,
    RankLost,
    RequestError,
    RequestTimeout,
    StepFailed,
    TransomError,
    WorkerLost,
)
from transom_core.model_config.architecture import read_architecture
from transom_core.model_files.resolve import resolve_model
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.adapter_slots import AdapterSlots, UserEnd
from transom_worker.engine.answer_grammars import AnswerGrammars
from transom_worker.engine.disk_tier import EngineDiskTier
from transom_worker.engine.running_request import Deadlines, RunningRequest
from transom_worker.engine.state_report import StepRates, worker_load, worker_state
from transom_worker.engine.transfer.store import TransferStore
from transom_worker.execution.executor import Executor, ExecutorInfo
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.kvcache.tiers.imports import KeptImports
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.request_validation import check_pooling, check_tokens, fit_model_len, stream_limit
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan
from transom_worker.telemetry.blockmap.log import BlockMapLog
from transom_worker.telemetry.engine_events import EngineEvents, EngineStepTimes, RequestTimes
from transom_worker.telemetry.engine_timelines import Clock, EngineTimelines
from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics
from transom_worker.telemetry.transfer_report import FetchReport

logger = logging.getLogger("transom.worker")

PUBLISH_PERIOD_S = 0.25  # how often a busy engine publishes its state for the metrics
MAX_OUT_OF_MEMORY = 3  # the engine ends when this many steps in a row have run out of memory
MAX_BLOCKED_S = 1.0  # the longest sleep of an engine whose requests wait for another worker, in case no event wakes it
OUT_OF_MEMORY = (
    "The worker ran out of memory in a step, and this request asked for the most of it: {row.num_tokens} tokens computed, "
    "{row.num_logit_rows} positions with logits, {row.num_attended} tokens of context. Send a shorter prompt, ask for fewer "
    "log-probabilities, or try again later; the operator may lower --max-num-batched-tokens or the size of the KV pool."
)
RESTARTING = "The worker lost a rank and starts its ranks again; try again in a moment."


class Engine:
    """One worker's engine. Not thread-safe: one thread calls it, and uses its parts (`scheduler`, `executor`).

    `metrics`, `timelines` and `block_map_log` consume `events`; `is_restarting` and `dead` may be read from any thread.

        running ──a rank is lost──> restarting ──the ranks start──> running
           └──a step fails──> dead <──the ranks do not start──┘

    A step that runs out of memory ends one request, and the engine goes on (`_run_out_of_memory`). A paused engine may replace its
    weights:

        pause(mode) -> is_quiet -> update_weights(model) -> pause(None)
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        worker: str = "0",
        *,
        clock: Clock = steady_time_s,
    ) -> None:
        """Start the executor; if this or a later step of the constructor raises, `build_engine` shuts the executor down.

        `clock` gives the time for deadlines and for the requests' events, in seconds since the epoch; any thread may call it.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.timelines = EngineTimelines(worker, clock)
        self.block_map_log = BlockMapLog()
        self.events = EngineEvents(self.block_map_log, self.timelines, *metrics.sinks)
        self.executor = executor
        info = executor.start()
        cache = KvCache(
            info.layout,
            info.host_layout,
            block_size=config.cache.block_size,
            identity=info.identity,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            window_repair=config.cache.window_repair,
        )
        max_model_len = fit_model_len(
            cache.capacity.longest_tokens(info.max_model_len),
            info.max_model_len,
            is_requested=config.model.max_model_len is not None,
        )
        self.scheduler = Scheduler(
            config.scheduler, cache, max_model_len=max_model_len, kv_policy_obstacle=info.kv_policy_obstacle
        )
        self.scheduler.admission.listeners.append(self.events)
        self.info: ExecutorInfo = replace(info, max_model_len=max_model_len)
        self.requests: dict[str, RunningRequest] = {}  # queued and running, by id
        self.forward_s = 0.0  # seconds that the ranks spent in forward passes, since start
        self.report = ""  # the start-up report, for people
        self.dead: Exception | None = None  # the error that ended the engine
        self.is_restarting = False
        self.is_updating = False  # it loads other weights
        # config.json of the model that it was started with; `build_engine` sets it
        self.model_config: Mapping[str, Any] = {}
        self.pause_mode: PauseMode | None = None  # None: it is not paused
        self._held_by_pause: list[str] = []  # ids of requests that came while it was paused with "wait"
        self._kept_imports = KeptImports(
            self.scheduler.cache.tiers.imports, is_waiting=self.scheduler.waits_for_admission, clock=clock
        )
        self.transfer_store: TransferStore | None = None  # None: this worker takes no part in KV transfer
        if info.shares is not None and config.cache.enable_prefix_caching:
            self.transfer_store = TransferStore(self.scheduler, executor, info.shares, self._kept_imports)
            self.transfer_store.memories = info.memories
        self._disk: EngineDiskTier | None = None
        if config.cache.disk_cache is not None:
            space_bytes = config.cache.disk_space_bytes
            folder = BlockFolder(
                Path(config.cache.disk_cache).expanduser(), info.disk_fingerprint, space_bytes=space_bytes
            )
            self._disk = EngineDiskTier(
                self.scheduler, folder, self._kept_imports, end_hold=self._end_disk_hold, clock=clock
            )
        self._eos_token_ids = frozenset(info.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
        self.grammars = AnswerGrammars(
            tokenizer,
            vocab_size=info.vocab_size,
            eos_token_ids=self._eos_token_ids,
            has_others=lambda: len(self.scheduler.admission.clients) > 1,
        )
        self.adapters = AdapterSlots(config.lora, executor.load_adapter)
        self.clock = clock
        self._deadlines = Deadlines(self.requests)
        self._ready: list[OutputEvent] = []  # events that the next call of `step` returns
        # New tokens that cannot end their requests, and when they came: `_step` makes their events when it has submitted a plan.
        self._later: list[tuple[RunningRequest, SequenceOutput]] = []
        self._later_s = 0.0
        self._rates = StepRates()
        self._num_out_of_memory = 0  # steps in a row
        self._made_no_plan = False  # the last step computed nothing
        self._published_s = 0.0
        self._has_unpublished_abort = False
        self.events.started(config, self.info)
        self.publish()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        if self.dead is not None:
            return bool(self._ready)
        return self.scheduler.has_work or self.is_restarting or self._has_other_work

    @property
    def _has_other_work(self) -> bool:
        """Whether `step` would do anything besides computing tokens and starting ranks."""
        return bool(
            self._ready
            or self.grammars.compiler.is_busy
            or self.adapters.is_busy
            or (self._disk is not None and self._disk.is_busy)
            or self._has_unpublished_abort
            or self.executor.lost
        )

    def on_disk_news(self, call: Callable[[], object]) -> None:
        """Have `call` called, on another thread, when files of the disk tier were added or removed, to wake an idle engine."""
        if self._disk is not None:
            self._disk.watch.on_news(call)

    @property
    def blocked_s(self) -> float:
        """How long the caller may sleep because `step` would do nothing, unless another method is called before.

        Above 0 only if requests or imports wait for blocks that another worker reads, or that are read from it, or for the end of a
        pause. At most `MAX_BLOCKED_S`, and not beyond the next deadline.
        """
        is_blocked = self.pause_mode == "keep" or self.scheduler.cache.tiers.others_hold_device
        if self._has_other_work or not (self._made_no_plan and is_blocked):
            return 0.0
        return max(0.0, min(MAX_BLOCKED_S, self._deadlines.next_s - self.clock()))

    def load(self) -> WorkerLoad:
        """Return how much this worker has to do now, for routers and the autoscaler."""
        return worker_load(self.scheduler, self._rates, self.clock())

    # Requests in and out

    def add(
        self, request: Request, *, arrival_s: float | None = None, is_held: bool = False, awaits_group: bool = False
    ) -> None:
        """Take one request, which arrived at this worker at `arrival_s` by `clock` (None: now). `step` returns its events.

        A request that `is_held` does not run before `stop_holding`, and one that `awaits_group` does not run before `end_group`. An
        engine that has only such requests has no work.

        Raises:
            RequestError: the request is wrong, too long or too large, or its id is in use.  Overloaded: the queue is full.
            WorkerLost: the ranks are being restarted.  EngineDead: an earlier step failed.
        """
        self._check_runs()
        self.adapters.check(request.adapter)
        check_tokens(request, vocab_size=self.info.vocab_size)
        check_pooling(request.params.pooling, num_labels=self.info.num_labels)
        arrival_s = self.clock() if arrival_s is None else arrival_s
        running = RunningRequest(
            request,
            self.tokenizer,
            eos_token_ids=self._eos_token_ids,
            max_model_len=stream_limit(request, self.info.max_model_len),
            arrival_s=arrival_s,
        )
        if running.finish_reason == "length" and request.grammar is not None:
            # Its grammar tells whether the last token completed it, too; the scheduler has nothing to do.
            self.grammars.check_room(request)
            self.requests[request.request_id] = running
            self.grammars.begin(running, request.grammar)
            return
        if running.finish_reason is not None:
            self._ready.append(running.end_event())
            return
        disk = None if is_held else self._disk
        waits = self.pause_mode == "wait"
        running.num_holds = int(is_held or disk is not None) + (request.grammar is not None) + awaits_group + waits
        running.num_holds += request.adapter is not None
        if waits:
            self._held_by_pause.append(request.request_id)
        self.grammars.check_room(request)
        self.scheduler.add(self._for_samplers(request), is_held=running.num_holds > 0)
        self.requests[request.request_id] = running
        if request.adapter is not None:
            self.adapters.begin(running, request.adapter)
        if request.grammar is not None:
            self.grammars.begin(running, request.grammar)
        if disk is not None and not disk.begin(request):
            self._end_hold(request.request_id)
        if request.time_left_s is not None:
            self._deadlines.watch(running, arrival_s + request.time_left_s)

    def _for_samplers(self, request: Request) -> Request:
        """Return a request whose stop tokens include the tokenizer's ends of text, since the ranks know those of the model's files
        alone: before `min_tokens` the samplers forbid all that end a text."""
        params, own = request.params, self._eos_token_ids.difference(self.info.eos_token_ids)
        if not own or params.ignore_eos or not params.min_tokens:
            return request
        return replace(request, params=replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(own))))

    def _check_runs(self) -> None:
        """Raise EngineDead or WorkerLost if the engine takes no requests now."""
        if self.dead is not None:
            raise EngineDead(f"The worker's engine has ended: {self.dead}")
        if self.is_restarting:
            raise WorkerLost(RESTARTING)

    def stop_holding(self, request_id: str, report: FetchReport) -> None:
        """Count a fetch that has ended, and let the held request run whose prefix it was; any other id is ignored."""
        self._rates.fetched(report.place, report.num_bytes, report.seconds, report.read_s, now_s=self.clock())
        if (running := self.requests.get(request_id)) is not None:
            self.events.prefix_fetched(running.times, report)
            running.num_fetched_tokens = report.num_tokens
            running.num_direct_tokens = report.num_tokens if report.on_device else 0
            self._end_hold(request_id)

    def end_group(self, request_ids: Iterable[str]) -> None:
        """Let the requests of a group run, now that all of them are there, unless something else still holds them."""
        for request_id in request_ids:
            self._end_hold(request_id)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once; no event follows. False if it is not running.

        The state is published by a later step, once for all requests that were dropped together.
        """
        if self._ready:  # also those of a request that has ended: another one may get its id
            self._ready = [event for event in self._ready if event.request_id != request_id]
        if request_id not in self.requests:
            return False
        self.scheduler.abort(request_id)
        self._report_end(self._remove(request_id), "abort")
        self._has_unpublished_abort = True
        return True

    def _end_disk_hold(self, request_id: str, num_tokens: int) -> None:
        """Let a request run for which `num_tokens` tokens were imported from the disk."""
        self.requests[request_id].num_disk_tokens = num_tokens
        self._end_hold(request_id)

    def _end_hold(self, request_id: str) -> None:
        """Remove one hold of a request, and let it run if that was the last one; unknown ids are ignored."""
        running = self.requests.get(request_id)
        if running is not None and running.num_holds:
            running.num_holds -= 1
            if not running.num_holds:
                self.scheduler.stop_holding(request_id)

    def _remove(self, request_id: str) -> RunningRequest:
        """Forget a request that has ended."""
        running = self.requests.pop(request_id)
        self.grammars.remove(running)
        if running.request.adapter is not None:
            self.adapters.remove(running)
        if self._disk is not None:
            self._disk.cancel(running.request)
        return running

    # Pauses, and other weights

    def pause(self, mode: PauseMode | None) -> None:
        """Pause, which `is_quiet` tells when it has come into effect; None ends a pause."""
        self.pause_mode = mode
        while mode is None and self._held_by_pause:
            self._end_hold(self._held_by_pause.pop(0))

    @property
    def is_quiet(self) -> bool:
        """Whether the engine is paused and computes nothing."""
        is_done = self.pause_mode == "keep" or self.requests.keys() <= set(self._held_by_pause)
        return self.pause_mode is not None and is_done and not self.scheduler.steps_in_flight

    def update_weights(self, model: str) -> None:
        """Replace the weights by those of another checkpoint. Requests that have begun go on with the tokens that they have, whose
        KV is computed again; routers say so in their usage. The engine must be quiet.

        Raises:
            RequestError: the engine is not quiet or has a disk tier, or the checkpoint is broken or has another architecture.
            EngineDead: the checkpoint could not be loaded, and the engine has ended.
        """
        if not self.is_quiet:
            raise RequestError("The worker computes; pause it first.")
        if self._disk is not None:
            raise RequestError(
                "A worker with --disk-cache cannot replace its weights: its files are those of one model."
            )
        begin_s, self.is_updating = time.perf_counter(), True
        try:
            self._check_architecture(model)  # downloads a Hugging Face model
            self.info = replace(self.executor.reload(model), max_model_len=self.info.max_model_len)
            self._end_adapter_waits(self.adapters.reload(), self._ready)
        except RequestError:
            raise
        except Exception as error:
            self._ready += self.fail(error)
            raise EngineDead(f"The worker could not load {model}: {error}") from error
        finally:
            self.is_updating = False
        # The old memory is gone only now: until then a read could still write into blocks that other imports would get.
        if self.transfer_store is not None:
            self.transfer_store.end_reads()
            self.transfer_store.memories = self.info.memories
        self._kept_imports.forget()
        self.scheduler.replace_model(self.info.identity)
        self.events.started(self.config, self.info)
        logger.info("The weights of %s took %.1f s.", model, time.perf_counter() - begin_s)
        self.publish()

    def _check_architecture(self, model: str) -> None:
        """Raise RequestError if a checkpoint is broken, or has another architecture than the model that the engine started with."""
        try:
            old, new = map(read_architecture, (self.model_config, resolve_model(model).config))
        except TransomError as error:
            raise RequestError(f"model_path: {error}", param="model_path") from error
        if old != new:
            raise RequestError(f"{model} has another architecture than the worker's model.", param="model_path")

    # The step loop

    def step(self, deliver: Callable[[list[OutputEvent]], None] | None = None) -> list[OutputEvent]:
        """Run until one result has arrived, or nothing can run; return the events of that step.

        With two steps in flight the ranks compute one plan while the engine handles a result and makes the next plan, and they
        must not wait for that. So if `deliver` is given, the events that do not decide about that plan are made after it, and
        most events are passed to `deliver` then, in the next call, instead of being returned.

        A failing step ends the engine: every request gets an error event, and `add` refuses from then on. A step that runs out of
        memory ends the request that asked for the most, and the others are computed again. When a rank is lost,
        every request gets an error event with which it can migrate, and the next call restarts all ranks.
        """
        events, self._ready = self._ready, []
        self._expire(events)
        if self.dead is not None:
            return events
        try:
            if self.is_restarting:
                self._restart_ranks()
            self._step(events, deliver if (self.config.scheduler.steps_in_flight or 1) > 1 else None)
        except OutOfMemory as error:
            events += self._run_out_of_memory(error)
        except RankLost as error:
            events += self._lose_ranks(error)
        except Exception as error:  # an unexpected error ends this engine, but no request may wait for ever
            events += self.fail(error)
        return events

    def _step(self, events: list[OutputEvent], deliver: Callable[[list[OutputEvent]], None] | None) -> None:
        """Run one step. It adds its events to `events` one by one, so that a failure in the middle loses none of them."""
        begin_s = time.perf_counter()
        self.executor.check()
        self._take_grammars(events)
        if self.adapters.is_busy:
            may_wait = not (events or self.scheduler.has_work)
            self._end_adapter_waits(self.adapters.take(may_wait=may_wait), events)
        if self._disk is not None:
            self._disk.take_news()
        self._fill()
        self._kept_imports.end_admitted()
        filled_s = time.perf_counter()
        self._send_later(events, deliver)
        self._made_no_plan = not self.scheduler.steps_in_flight
        if self._made_no_plan or filled_s - self._published_s > PUBLISH_PERIOD_S:
            self.publish()
        if self._made_no_plan:
            return
        scheduled_s = time.perf_counter()
        plan = self.scheduler.steps_in_flight[0].plan
        result = self.executor.receive()
        received_s = time.perf_counter()
        outputs = self.scheduler.receive(result)
        if self._disk is not None:
            self._disk.step_done(result)
        self._num_out_of_memory = 0
        self.forward_s += result.timings.forward_s
        now_s = self.clock()
        self._rates.stepped(plan.num_tokens, len(plan.seq_ids), received_s - begin_s, now_s=now_s)
        self._advance(self._split(outputs, now_s, all_now=deliver is None), events, now_s)
        self._compute_masks(outputs, events)
        end_s = time.perf_counter()
        output_s = scheduled_s - filled_s + end_s - received_s
        times = EngineStepTimes(filled_s - begin_s, received_s - scheduled_s, output_s)
        self.events.stepped(result.timings, times)
        if not self.requests:
            self.publish()
        if deliver is not None and self.scheduler.steps_in_flight:
            self._ready += events  # they go out with the others of this step
            events.clear()

    def _fill(self) -> None:
        """Submit plans until `steps_in_flight` are in flight, or there is nothing to plan.

        With two in flight, the ranks begin the next step while the engine still handles the previous step's tokens.
        """
        while self.pause_mode != "keep" and (plan := self.scheduler.schedule()) is not None:
            if grammar_rows := self.scheduler.steps_in_flight[-1].grammar_rows:
                rows = [(row, self.requests[request_id]) for row, request_id in grammar_rows]
                plan.grammar_mask = self.grammars.plan_mask(rows, sum(plan.sample))
            self.executor.submit(plan)
            self._report_plan(plan)

    def _split(
        self, outputs: list[SequenceOutput], now_s: float, *, all_now: bool
    ) -> list[tuple[RunningRequest, SequenceOutput]]:
        """Return the tokens, each with its request, whose events must be made before the next plan; keep the others for later."""
        pairs = [(running, one) for one in outputs if (running := self.requests.get(one.request_id)) is not None]
        if all_now:
            return pairs
        may_end = [running.may_end(output) for running, output in pairs]
        self._later_s, self._later = now_s, [pair for pair, may in zip(pairs, may_end, strict=True) if not may]
        return [*compress(pairs, may_end)]

    def _send_later(self, events: list[OutputEvent], deliver: Callable[[list[OutputEvent]], None] | None) -> None:
        """Make the events of the tokens that were kept for later, and pass all events to `deliver` if it is given."""
        later, self._later = self._later, []
        decoding: list[RequestTimes] = []
        for running, output in later:
            if self.requests.get(output.request_id) is running:  # else it ended after the token was sampled
                events.append(running.plain_event(output))
                decoding.append(running.times)
        self.events.tokens(decoding, self._later_s)
        if deliver is not None and events:
            deliver([*events])
            events.clear()

    def _advance(
        self, pairs: list[tuple[RunningRequest, SequenceOutput]], events: list[OutputEvent], now_s: float
    ) -> None:
        """Add the sampled tokens to their requests, some of which end with them, and the events of both to `events`."""
        decoding: list[RequestTimes] = []  # of the requests whose token is not reported yet
        for running, output in pairs:
            try:
                event = running.token_event(output)
            except (RequestError, StepFailed, WorkerLost) as error:  # an error of the request's grammar
                self.grammars.num_failed += 1
                self.scheduler.abort(output.request_id)
                events.append(self._end_with_error(output.request_id, error))
                continue
            events.append(event)
            if output.is_first:
                self._rates.first_token(running.times.arrival_s, now_s)
                self.events.first_token(running.times, now_s)
            else:
                decoding.append(running.times)
            if event.finish_reason is not None or event.is_handover:
                self.events.tokens(decoding, now_s)  # the end of a request is reported after its last token
                decoding = []
                self.scheduler.abort(output.request_id)
                self._report_end(self._remove(output.request_id), event.finish_reason or "handover")
        self.events.tokens(decoding, now_s)

    # LoRA adapters

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        """Have a step load a LoRA adapter into a slot, as the first request for it would. The future gets the error if that fails.

        Raises:
            RequestError: this worker takes no adapters.  WorkerLost: the ranks are being restarted.  EngineDead.
        """
        self._check_runs()
        self.adapters.check(adapter)
        trial: Future[None] = Future()
        self.adapters.begin(trial, adapter)
        return trial

    def _end_adapter_waits(self, ends: Iterable[UserEnd], events: list[OutputEvent]) -> None:
        """Let the requests run whose adapters are in a slot, and end those whose adapters cannot be loaded."""
        for user, slot, error in ends:
            if isinstance(user, Future):
                self.adapters.remove(user)
                if user.set_running_or_notify_cancel():
                    user.set_result(None) if error is None else user.set_exception(error)
                continue
            request_id = user.request.request_id
            if error is None:
                self.scheduler.by_request[request_id].adapter_slot = slot
                self._end_hold(request_id)
            else:
                self.scheduler.abort(request_id)
                events.append(self._end_with_error(request_id, error))

    # Grammars

    def _take_grammars(self, events: list[OutputEvent]) -> None:
        """Let the requests run whose grammars are ready, and end those whose grammars have failed."""
        if not self.grammars.compiler.is_busy:
            return
        is_idle = not (events or self.scheduler.has_work)
        for running, matcher, error in self.grammars.take_ready(may_wait=is_idle):
            request_id = running.request.request_id
            if self.requests.get(request_id) is not running:  # it was aborted
                continue
            failure = error if matcher is None else self.grammars.hold(running, matcher)
            if not self._has_ended(running, failure, events):
                self._end_hold(request_id)

    def _compute_masks(self, outputs: list[SequenceOutput], events: list[OutputEvent]) -> None:
        """Compute which tokens may follow the new ones in answers with a grammar, and end the answers that nothing may follow."""
        if not len(self.grammars.masks):
            return
        found = (self.requests.get(output.request_id) for output in outputs)
        held = [running for running in found if running is not None and running.grammar is not None]
        if held:
            for running, failure in zip(held, self.grammars.compute(held), strict=True):
                self._has_ended(running, failure, events)

    def _has_ended(self, running: RunningRequest, failure: Exception | None, events: list[OutputEvent]) -> bool:
        """End a request whose grammar failed or allows no further token; return whether it has ended."""
        request_id = running.request.request_id
        if failure is None and running.finish_reason is None:
            return False
        self.scheduler.abort(request_id)
        if failure is not None:
            self.grammars.num_failed += 1
            events.append(self._end_with_error(request_id, failure))
        else:
            event = running.end_event()
            events.append(event)
            self._report_end(self._remove(request_id), event.finish_reason or "stop")
        return True

    def _expire(self, events: list[OutputEvent]) -> None:
        """End the requests whose deadline has passed with an error."""
        for request_id in self._deadlines.take_passed(self.clock()):
            self.scheduler.abort(request_id)
            events.append(self._end_with_error(request_id, RequestTimeout("The request's deadline has passed.")))

    # Failures

    def fail(self, reason: Exception) -> list[OutputEvent]:
        """End the engine: `add` refuses from now on, and every request gets an error event, with which it can migrate."""
        self.dead = self.dead or reason
        self.is_restarting = False
        self.adapters.forget(WorkerLost(f"The worker's engine has ended: {reason}"))
        if not isinstance(reason, WorkerLost):
            cause = reason.loss_cause if isinstance(reason, StepFailed) else "exception"
            reason = EngineDead(f"The worker's engine has ended: {reason}", loss_cause=cause)
        ready, self._ready = self._ready, []
        return ready + self._end_all_with_error(reason)

    def _run_out_of_memory(self, error: OutOfMemory) -> list[OutputEvent]:
        """End the request that asked for the most in the failed step; the scheduler computes the others again.

        The request gets an `OutOfMemory` error, not a `WorkerLost`: it must not migrate, since another worker with as much memory
        would run out of memory too.
        """
        events = self._end_largest()
        if self._num_out_of_memory == MAX_OUT_OF_MEMORY:
            return events + self.fail(error)
        logger.error("%s One request ends; the others of the step are computed again.", error)
        self.scheduler.compute_again()
        self.publish()
        return events

    def _end_largest(self) -> list[OutputEvent]:
        """End the request that asked for the most in a step that ran out of memory, unless it has ended meanwhile."""
        self._num_out_of_memory += 1
        self.events.ran_out_of_memory()
        row = self.scheduler.ran_out_of_memory()
        request_id = None if row is None else row.sequence.request.request_id
        if request_id not in self.requests:
            return []
        self.scheduler.abort(request_id)
        return [self._end_with_error(request_id, OutOfMemory(OUT_OF_MEMORY.format(row=row)))]

    def _lose_ranks(self, error: RankLost) -> list[OutputEvent]:
        """End every request, since its KV blocks are gone: it migrates to another worker, or comes back here after the restart.

        If the rank ran out of memory, the request that asked for the most does not migrate: it would end another worker's rank too.
        """
        if self.is_restarting:  # the ranks were lost while they started: another attempt would probably fail, too
            return self.fail(error)
        logger.error("A rank was lost (%s); starting all ranks again.", error)
        self.is_restarting = True
        self.events.ranks_lost()
        events = self._end_largest() if isinstance(error.__cause__, OutOfMemory) else []
        if events and self._num_out_of_memory == MAX_OUT_OF_MEMORY:
            return events + self.fail(error)
        if self._disk is not None:
            self._disk.forget_loads()
        if self.transfer_store is not None:
            self.transfer_store.end_reads()
        self._kept_imports.forget()
        self.scheduler.reset()
        lost = WorkerLost(f"The worker lost a rank: {error}", loss_cause=error.loss_cause)
        self.adapters.forget(lost)
        events += self._end_all_with_error(lost)
        self.publish()  # the next step starts the ranks, which may take minutes
        return events

    def _restart_ranks(self) -> None:
        """Start all ranks again. Raises EngineDead if the model's files have changed, so that cached prefixes would differ."""
        begin_s = time.perf_counter()
        info = self.executor.restart()
        if self.transfer_store is not None:
            self.transfer_store.memories = info.memories
        if info.identity != self.info.identity:
            raise EngineDead(
                "The model's files have changed since this worker began; it ends, and another takes its place."
            )
        self.is_restarting = False
        logger.info("All ranks run again after %.1f s.", time.perf_counter() - begin_s)
        self.publish()

    def _end_all_with_error(self, error: WorkerLost) -> list[OutputEvent]:
        """End every request with this error; its `num_lost` becomes the number of requests that had begun to run."""
        error.num_lost = sum(bool(running.times.scheduled_s) for running in self.requests.values())
        return [self._end_with_error(request_id, error) for request_id in list(self.requests)]

    def _end_with_error(self, request_id: str, error: Exception) -> OutputEvent:
        running = self._remove(request_id)
        self._report_end(running, "error")
        return running.error_event(error)

    def shutdown(self) -> None:
        """Free the executor's memory and processes; idempotent.

        Cached prefixes are written to the disk tier before, if there is one, unless the engine ended by a failure.
        """
        self.grammars.compiler.close()
        disk, self._disk = self._disk, None
        was_stopped = isinstance(self.dead, EngineDead) and self.dead.loss_cause == "stopped"
        if disk is not None:
            disk.watch.close()
            if not self.is_restarting and (self.dead is None or was_stopped):
                disk.flush(self.executor)
        self.executor.shutdown()
        if self.transfer_store is not None:
            self.transfer_store.end_reads()
        self.events.close()

    # What the events report

    def publish(self) -> None:
        """Publish the state of queue, cache and ranks for the metrics."""
        self._published_s = time.perf_counter()
        self._has_unpublished_abort = False
        waiting = (one.times.arrival_s for one in self.requests.values() if not one.times.scheduled_s)
        ranks, oldest_s = self.executor.rank_reports(), min(waiting, default=0.0)
        self.events.published(
            worker_state(
                self.scheduler,
                self._rates,
                ranks,
                self.grammars.stats(),
                self.adapters.stats(),
                now_s=self.clock(),
                oldest_waiting_s=oldest_s,
            )
        )

    def _report_plan(self, plan: StepPlan) -> None:
        """Report a plan that was sent, and the requests that it computes for the first time."""
        self.events.scheduled(plan)
        for new in plan.new_sequences:
            times = self.requests[new.request_id].times
            if not times.scheduled_s:
                times.scheduled_s = self.clock()
                self.events.first_scheduled(times, num_prompt_tokens=new.num_prompt_tokens)

    def _report_end(self, running: RunningRequest, finish_reason: str) -> None:
        self.events.finished(running.times, finish_reason, num_output_tokens=running.num_output_tokens)
