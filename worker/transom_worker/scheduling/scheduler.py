"""`Scheduler`: continuous batching. It takes requests, plans each step, and applies each step's result to the requests.

Terms:

    step       one forward pass of all ranks (the processes that compute)
    plan       what one step computes (`step.StepPlan`); its *rows* are the sequences that it computes
    in flight  said of a plan whose result has not arrived; the setting `steps_in_flight` bounds how many plans may be in flight
    sequence   one request inside the scheduler (`sequence.Sequence`)
    publish    make a computed KV block findable in the prefix cache
    copies     block copies within the device (compaction moves blocks together) or between tiers; a plan carries them to the ranks

One step from the caller's side:

    plan = scheduler.schedule()          # which sequences compute how many tokens; their KV blocks are allocated
    result = ...                         # the ranks execute the plan
    outputs = scheduler.receive(result)  # publish and free KV blocks; the sampled tokens

The parts: `admission` holds the queue and the running sequences, `step_planner` makes the plans, `kvcache` owns the blocks.
"""

from array import array
from collections import deque
from collections.abc import Iterator

from transom_core.config import SchedulerConfig
from transom_core.contract import Request
from transom_core.errors import Overloaded
from transom_core.kv_cache.groups import GroupKind
from transom_core.kv_cache.hashing import chain_root
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.policy_retentions import PolicyRetentions
from transom_worker.kvcache.stats import CacheStats
from transom_worker.scheduling.admission import AdmissionControl
from transom_worker.scheduling.clients import MAX_TOKENS
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.prompt_pace import PromptPace
from transom_worker.scheduling.queue import order_time_s
from transom_worker.scheduling.rate_meter import RateMeter
from transom_worker.scheduling.request_validation import check_admission
from transom_worker.scheduling.sequence import Held, InQueue, Sequence, SequenceStatus
from transom_worker.scheduling.step import StepPlan, StepResult
from transom_worker.scheduling.step_budget import LargestRow, StepTokenLimit, chunk_limit, largest_row
from transom_worker.scheduling.step_planner import PlannedStep, StepPlanner
from transom_worker.scheduling.work_counts import PolicyStats, WorkCounts


class Scheduler:
    """Plans steps over integers alone: no tensors. Not thread-safe: only the engine's thread calls it.

    With no plan in flight, `schedule` returns a plan whenever a request can compute a token. A sequence at its length limit
    computes nothing more and keeps its blocks until the engine calls `abort`.

    `max_chunk` is the most tokens of one sequence in a step (derived from the layout if None); `pace` limits the prompt tokens
    of a step (made from the config if None); `kv_policy_obstacle` says why the model's layers cannot follow a request's KV policy
    (empty if they can, as far as the cache's groups allow it). Times are those of the cache's clock.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KvCache,
        *,
        max_model_len: int,
        max_chunk: int | None = None,
        pace: PromptPace | None = None,
        kv_policy_obstacle: str = "",
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.cache = cache
        self.kv_policy_obstacle = kv_policy_obstacle or _policy_obstacle(cache.layout)
        self.policy_retentions = PolicyRetentions(cache.retentions, block_size=cache.block_size)
        self.work = WorkCounts()
        self.admission = AdmissionControl(cache, self.work, preemption_mode=config.preemption_mode)
        self._pace = pace or PromptPace(config.target_step_s)
        self._rates = None
        if cache.changes.rates is not None:  # there is a host tier
            self._rates = RateMeter([group.stride_bytes for group in cache.layout.groups])
        self._token_limit = StepTokenLimit(config.max_num_batched_tokens)
        self._planner = StepPlanner(
            config,
            self._token_limit,
            self.admission,
            self.work,
            max_chunk=max_chunk or chunk_limit(cache.layout, cache.block_size),
            pace=self._pace,
        )
        self.by_request: dict[str, Sequence] = {}
        self.steps_in_flight: deque[PlannedStep] = deque()
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether the engine must step: a request is unfinished and not held, a plan is in flight, a load is not reported, or an
        import waits for copies."""
        if len(self.by_request) > len(self.admission.waiting.held) or self.steps_in_flight:
            return True
        return self.admission.moves.is_loading or self.cache.tiers.imports.is_waiting

    @property
    def num_running(self) -> int:
        """Running sequences, which hold KV blocks."""
        return len(self.admission.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running: new and preempted ones, and those that wait for a prefix that another one computes."""
        return len(self.admission.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before every request has its next output token.

        A waiting sequence counts with all its tokens, since its prefix-cache hit is not known yet; a sequence that waits for
        another's prefix counts with the tokens after that prefix.
        """
        waiting = sum(sequence.reserved_tokens or len(sequence.token_ids) for sequence in self.admission.waiting)
        return waiting + sum(max(0, sequence.num_ready - 1) for sequence in self.admission.running)

    def sequences_with_blocks(self) -> list[Sequence]:
        """Return all sequences that hold KV blocks: running ones, and finished ones that a step in flight still computes."""
        ended = {
            sequence.seq_id: sequence
            for step in self.steps_in_flight
            for sequence in step.rows
            if sequence.status is SequenceStatus.FINISHED and sequence.blocks is not None
        }
        return [*self.admission.running, *ended.values()]

    def stats(self) -> CacheStats:
        """Return the statistics of the KV cache."""
        return self.cache.stats()

    def policy_stats(self) -> dict[str, PolicyStats]:
        """Return, by type, what KV policies keep and drop, and how they change outputs."""
        return self.admission.policy_counts.stats(self.sequences_with_blocks(), block_size=self.cache.block_size)

    # Requests in and out

    def add(self, request: Request, *, is_held: bool = False) -> None:
        """Queue a request; with `is_held` it is not admitted before `stop_holding`.

        Raises:
            RequestError, PromptTooLong, RequestTooLarge: see `request_validation.check_admission`.
            Overloaded: the queue is full.
        """
        limit = check_admission(
            request,
            self.cache,
            in_use=self.by_request,
            policy_retentions=self.policy_retentions,
            max_model_len=self.max_model_len,
            kv_policy_obstacle=self.kv_policy_obstacle,
        )
        ahead = self.num_waiting + len(self.admission.running) - self.config.max_num_seqs
        num_places = self.config.max_waiting + self.config.max_num_seqs
        clients = self.admission.clients
        if ahead >= self.config.max_waiting and clients.exceeds_share(request, num_places=num_places):
            raise Overloaded(
                f"{self.num_waiting} requests are waiting and the limit is {self.config.max_waiting}; try again later."
            )
        if clients.num_tokens >= MAX_TOKENS and clients.exceeds_share(request, num_tokens=MAX_TOKENS):
            raise Overloaded(
                f"Requests with {clients.num_tokens:,} tokens are here and the limit is {MAX_TOKENS:,}; try again later."
            )
        self._num_arrived += 1
        sequence = Sequence(
            request=request,
            order_key=(order_time_s(request, self.config, self.cache.clock()), self._num_arrived),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens_total=limit,
            root=self.root_of(request),
            token_ids=array("I", request.prompt_token_ids + request.resumed_output_ids),
            retentions=self.policy_retentions.of(request.kv_policy),
        )
        self.by_request[request.request_id] = sequence
        self.admission.clients.join(sequence)
        self.admission.policy_counts.queued(request)
        self.admission.waiting.put(sequence, Held() if is_held else InQueue())
        for listener in self.admission.listeners:
            listener.queued(sequence, num_ahead=self.admission.waiting.num_before(sequence))

    def root_of(self, request: Request) -> bytes:
        """Return the root of a request's hash chain. Any thread may call this."""
        return chain_root(
            self.cache.block_size,
            identity=self.cache.identity,
            cache_salt=request.cache_salt,
            kv_policy=None if request.kv_policy is None else request.kv_policy.text,
            adapter=None if request.adapter is None else request.adapter.identity,
        )

    def stop_holding(self, request_id: str) -> None:
        """Let a held request be admitted; any other id is ignored, since the request may have ended meanwhile."""
        sequence = self.by_request.get(request_id)
        if sequence is not None and sequence.is_held:
            self.admission.waiting.put(sequence, InQueue())

    def waits_for_admission(self, request_id: str) -> bool:
        """Return whether a request has not been admitted yet, held or not; False for an unknown id."""
        sequence = self.by_request.get(request_id)
        return sequence is not None and not sequence.was_admitted

    def abort(self, request_id: str) -> bool:
        """End a request in any status, complete or not; return whether there was one.

        Blocks that a step in flight uses are freed when its result arrives; the token that it samples is discarded.
        """
        sequence = self.by_request.pop(request_id, None)
        if sequence is None:
            return False
        self.admission.finish(sequence)
        return True

    # Steps

    def schedule(self) -> StepPlan | None:
        """Return the next plan; None if nothing can be computed now, or `steps_in_flight` plans are in flight.

        The caller sets its `grammar_mask` if the newest of `steps_in_flight` has `grammar_rows`.
        """
        if len(self.steps_in_flight) >= (self.config.steps_in_flight or 1):
            return None
        step = self._planner.plan(steps_in_flight=len(self.steps_in_flight))
        if step is None:
            return None
        self.steps_in_flight.append(step)
        return step.plan

    def receive(self, result: StepResult) -> list[SequenceOutput]:
        """Apply the oldest plan's result: publish and free KV blocks, and return the sampled tokens in row order.

        `result` then has the tickets of whole loads instead of their pieces' (`LoadTurns`).
        """
        step = self.steps_in_flight.popleft()
        plan = step.plan
        if result.step_id != plan.step_id:
            raise ValueError(f"result of step {result.step_id} where step {plan.step_id} was due")
        result.loaded, result.load_s, result.failed = self.cache.copies.ended(
            result.loaded, result.load_s, result.failed, step_s=result.timings.compute_s
        )
        self._token_limit.stepped()
        self._pace.stepped(plan, result.timings)
        if self._rates is not None:
            self._measure(self._rates, plan, result)
        for ticket in result.loaded:
            self.admission.loaded(ticket)
        outputs, sample, running = [], 0, SequenceStatus.RUNNING
        sampled_ids, logprobs = result.sampled_ids, result.logprobs or [None] * len(result.sampled_ids)
        has_prompt_results = bool(result.prompt_logprobs or result.hidden_sums)
        rows = zip(step.rows, plan.start, plan.count, plan.sample, strict=True)
        for row, (sequence, start, count, samples) in enumerate(rows):
            processed = start + count
            sequence.num_in_flight -= 1
            blocks, status = sequence.blocks, sequence.status
            assert blocks is not None
            if is_finished := status is not running and status is SequenceStatus.FINISHED:
                processed = min(processed, len(sequence.token_ids))  # its last token may have been discarded
            if processed >= blocks.next_event_at:
                self.cache.advance(blocks, sequence.token_ids, processed)
                self.admission.in_flight_prefixes.published(sequence)
            else:
                blocks.processed = processed
            if not is_finished:
                if sequence.history is not None:
                    (table,) = blocks.tables
                    columns = (*range(len(table.sink_blocks)), *table.run_logicals)
                    sequence.history.add(columns, result.attention_mass[row])
                if has_prompt_results:
                    sequence.take_prompt_results(result.prompt_logprobs.get(row), result.hidden_sums.get(row))
                if samples:
                    quality = result.quality.get(row) if result.quality else None
                    if quality is not None:
                        self.admission.policy_counts.compared(sequence.request, quality)
                    outputs.append(sequence.take_token(sampled_ids[sample], logprobs[sample], quality))
            if status is not running and not sequence.num_in_flight:
                self.admission.release_after_step(sequence)
            sample += samples
        return outputs

    def _measure(self, meter: RateMeter, plan: StepPlan, result: StepResult) -> None:
        """Learn what computing and loading cost; give the cache new rates where they have changed."""
        meter.stepped(plan, result.timings)
        for ticket, elapsed_s in zip(result.loaded, result.load_s, strict=True):
            meter.loaded(self.cache.tiers.loads.num_blocks(ticket), elapsed_s)
        present = self.cache.changes.rates
        if present is not None and (rates := meter.next_rates(present)) is not None:
            self.cache.changes.set_rates(rates)

    def fail_in_flight(self) -> list[str]:
        """Forget all plans in flight, since the engine's process was interrupted, and end their requests; return their ids.

        It is unknown whether the ranks made all block copies of these plans. So loads are sent again. If there were other copies,
        the contents of blocks are unknown: all other sequences are computed again, and both tiers are emptied.
        """
        tickets = {ticket for step in self.steps_in_flight for ticket in step.plan.copy_ticket}
        self.cache.tiers.loads.send_again(sorted(tickets))
        taken = [sequence.request.request_id for sequence in self._take_back_plans()]
        for request_id in taken:
            self.abort(request_id)
        if 0 in tickets:  # the ticket of copies that are not part of a load
            self.admission.preempt_all()
        return taken

    def ran_out_of_memory(self) -> LargestRow | None:
        """Make steps smaller for a while, since the oldest plan in flight ran out of memory.

        Return the plan's row that asked for the most; None if no plan is in flight, or the plan only carried copies.
        """
        if not self.steps_in_flight:
            return None
        oldest = self.steps_in_flight[0]
        if not oldest.rows:
            return None
        self._token_limit.ran_out_of_memory(oldest.plan.num_tokens)
        return largest_row(oldest.plan, oldest.rows)

    def compute_again(self) -> None:
        """Forget all plans in flight, since the oldest one failed and left the ranks able to go on; compute their requests again.

        What the failed step has written is not used: its sequences are preempted, and only blocks of steps with a result have been
        published. The ranks get these sequences anew, so it does not matter how much of the plan they have done. They make the
        block copies of all plans, and report the loads, in any case (`StepPlan`).
        """
        for sequence in self._take_back_plans():
            if sequence.status is SequenceStatus.RUNNING:  # else it has returned to the queue
                self.admission.preempt(sequence)

    def _take_back_plans(self) -> list[Sequence]:
        """Forget all plans in flight, release their preempted and finished sequences, and return the unfinished ones."""
        taken = []
        while self.steps_in_flight:
            step = self.steps_in_flight.popleft()
            self.admission.restore_finished_ids(step.plan.finished)
            for sequence in step.rows:
                sequence.num_in_flight -= 1
                if sequence.num_in_flight:
                    continue
                was_done = sequence.status is SequenceStatus.FINISHED
                if sequence.status is not SequenceStatus.RUNNING:
                    self.admission.release_after_step(sequence)
                if not was_done:
                    taken.append(sequence)
        return taken

    def plans_to_store_all(self, *, piece_bytes: int) -> Iterator[StepPlan]:
        """Yield plans that copy all cached nodes to the disk tier, about `piece_bytes` each. No other plan may come after them."""
        nodes = self.cache.eviction.best_first()
        for _ in self.cache.tiers.stores.store_in_pieces(nodes, piece_bytes=piece_bytes):
            yield self._planner.plan_copies()

    def replace_model(self, identity: str) -> None:
        """Go on with the weights of another model, which the ranks have loaded anew: compute all sequences again, and evict every
        block. No plan may be in flight."""
        self.admission.abandon_loads()
        self.admission.preempt_all()
        self.cache.copies.clear()
        self.admission.take_finished_ids()
        self.cache.identity = identity
        for sequence in self.by_request.values():
            sequence.root, sequence.chain = self.root_of(sequence.request), []

    def reset(self) -> None:
        """End every request, forget every plan and evict every block, since the restarted ranks know no sequences."""
        self.admission.abandon_loads()
        self.fail_in_flight()
        for request_id in list(self.by_request):
            self.abort(request_id)
        self.cache.evict_all()
        self.cache.copies.clear()
        self.admission.take_finished_ids()


def _policy_obstacle(layout: ArenaLayout) -> str:
    """Return why sequences on this cache cannot have a KV policy; empty if they can."""
    others = [group.spec.name for group in layout.groups if group.spec.kind is not GroupKind.FULL]
    return f"this one has the KV cache groups {', '.join(others)}" if others else ""
