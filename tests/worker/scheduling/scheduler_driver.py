"""Scheduler and replay executor run together, with every invariant checked after each operation."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.worker.kvcache.cache_model import BLOCK, ENTRY_MIXES, MIXES, Mirror, check_cache, layout
from tests.worker.scheduling.replay_executor import ReplayExecutor, sampled_token
from tests.worker.scheduling.scheduler_checks import WorkModel, check_waiters
from transom_core.config import SchedulerConfig
from transom_core.contract import Request, SamplingParams
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.manager import KvCache
from transom_worker.scheduling.listener import SchedulerListener
from transom_worker.scheduling.outputs import SequenceOutput
from transom_worker.scheduling.prompt_pace import PromptPace
from transom_worker.scheduling.request_validation import stream_limit
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.sequence import Sequence
from transom_worker.scheduling.step import StepPlan

__all__ = ["BLOCK", "ENTRY_MIXES", "MIXES", "Driver", "layout", "request"]


def request(
    request_id: str,
    prompt: list[int] | range,
    max_tokens: int | None = 4,
    *,
    resumed: tuple[int, ...] = (),
    **fields: object,
) -> Request:
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=params,  # type: ignore[arg-type]
        seed=0,
        resumed_output_ids=resumed,
        **fields,  # type: ignore[arg-type]
    )


class AdmittedRequests(SchedulerListener):
    """A scheduler's listener that notes which requests were admitted."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def admitted(self, sequence: Sequence, *, tokens: Mapping[str, int]) -> None:
        self._names.add(sequence.request.request_id)


class Driver:
    """Takes the engine's part: finishes requests at their limit, and at stops where `stop_at` says so."""

    def __init__(
        self,
        layout: ArenaLayout,
        *,
        max_model_len: int = 96,
        caching: bool = True,
        window_repair: bool = True,
        min_shared_tokens: int | None = None,
        max_chunk: int | None = None,
        pace: PromptPace | None = None,
        host_pages: int = 0,
        load_after: Callable[[], int] = lambda: 0,
        **config: object,
    ) -> None:
        settings: dict[str, object] = dict(max_num_seqs=8, max_num_batched_tokens=16) | config
        self.now_s: float | None = None  # a test's own time; None: the real one
        self.scheduler = Scheduler(
            SchedulerConfig(**settings),  # type: ignore[arg-type]
            KvCache(
                layout,
                replace(layout, num_pages=host_pages) if host_pages else None,
                block_size=BLOCK,
                enable_prefix_caching=caching,
                window_repair=window_repair,
                clock=lambda: time.monotonic() if self.now_s is None else self.now_s,
            ),
            max_model_len=max_model_len,
            max_chunk=max_chunk,
            pace=pace,
        )
        if min_shared_tokens is not None:
            self.scheduler.admission.in_flight_prefixes.min_shared_tokens = min_shared_tokens
        self.admitted: set[str] = set()  # requests that were admitted at least once
        self.scheduler.admission.listeners.append(AdmittedRequests(self.admitted))
        self.max_model_len = max_model_len
        self.executor = ReplayExecutor(layout, load_after=load_after)
        self.mirror = Mirror(len(layout.groups))
        self.mirror.apply(self.scheduler.cache.changes.whole())
        self.work = WorkModel()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.finished: list[str] = []
        self.stop_at: dict[str, int] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.has_run_out_of_memory = False
        self.num_followed = 0  # waits for another's units, summed over all checks

    def add(self, item: Request) -> None:
        self.scheduler.add(item)
        self.requests[item.request_id] = item
        self.tokens[item.request_id] = list(item.resumed_output_ids)
        self.outputs[item.request_id] = []

    def abort(self, request_id: str) -> None:
        if self.scheduler.abort(request_id):
            self.finished.append(request_id)

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            least = 0 if self.scheduler.admission.moves.is_loading else 1
            assert least <= plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
            assert len(plan.seq_ids) == len(set(plan.seq_ids)) <= self.scheduler.config.max_num_seqs
            self.executor.submit(plan)
            self.work.take(plan)
            self.in_flight.append(plan)
        return plan

    def next_plan(self) -> StepPlan:
        """Schedule a step; there must be something to compute."""
        plan = self.schedule()
        assert plan is not None
        return plan

    def receive(self) -> None:
        self.in_flight.popleft()
        for output in self.scheduler.receive(self.executor.receive()):
            self._take(output)

    def fail(self) -> None:
        """The engine is interrupted: the requests of all plans in flight end, and none of the plans' copies are made."""
        rows = {sequence for step in self.scheduler.steps_in_flight for sequence in step.rows}
        self.in_flight.clear()
        self.executor.fail()
        failed = self.scheduler.fail_in_flight()
        computed = {one.request.request_id for one in rows} - set(self.finished)
        assert sorted(failed) == sorted(computed)  # those that the plans compute, and no more
        self.finished += failed

    def run_out_of_memory(self) -> None:
        """The oldest step in flight runs out of memory: the requests of all plans in flight are computed again."""
        self.has_run_out_of_memory = True
        self.scheduler.ran_out_of_memory()
        self.in_flight.clear()
        self.executor.fail(makes_copies=True)
        self.scheduler.compute_again()

    def _take(self, output: SequenceOutput) -> None:
        name = output.request_id
        assert name not in self.finished
        tokens = self.tokens[name]
        assert output.position == len(tokens)
        assert output.token_id == sampled_token(name, output.position)
        assert output.is_first == (not self.outputs[name])
        tokens.append(output.token_id)
        self.outputs[name].append(output)
        item = self.requests[name]
        longest = stream_limit(item, self.max_model_len)
        if output.is_first and item.params.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None
            assert not output.num_cached_tokens
            assert [one.chosen.token_id for one in output.prompt_logprobs] == list(item.prompt_token_ids[1:])
        else:
            assert output.prompt_logprobs is None
        at_limit = len(tokens) == item.params.max_tokens or item.num_prompt_tokens + len(tokens) == longest
        assert output.at_limit == at_limit
        if at_limit or len(tokens) == self.stop_at.get(name):
            self.scheduler.abort(name)
            self.finished.append(name)

    def step(self) -> None:
        """One turn of an engine: fill the pipeline, then take a result."""
        while self.schedule() is not None:
            self.check()
        waits_for_others = self.scheduler.cache.tiers.exports.reads_device
        assert self.in_flight or waits_for_others or not self.scheduler.has_work, "work, but nothing to do"
        if self.in_flight:
            self.receive()
            self.check()

    def run(self, *, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests never finished")

    def check(self) -> None:
        scheduler = self.scheduler
        self.check_window_blocks()
        self.num_followed += check_waiters(scheduler)
        blocks = {id(s.blocks): s.blocks for s in scheduler.by_request.values() if s.blocks}
        blocks |= {id(s.swapped): s.swapped for s in scheduler.by_request.values() if s.swapped}
        blocks |= {id(load.blocks): load.blocks for load in scheduler.cache.tiers.loads.by_ticket.values()}
        rows = [sequence for step in scheduler.steps_in_flight for sequence in step.rows]
        assert all(sequence.blocks for sequence in rows)  # they are freed only with the result
        blocks |= {id(s.blocks): s.blocks for s in rows if s.blocks}
        check_cache(scheduler.cache, blocks.values())
        self.mirror.apply(scheduler.cache.changes.take())
        for tier, groups in enumerate(scheduler.cache.index.tiers):
            assert self.mirror.tiers[tier] == [set(index) for index in groups]

    def check_work(self) -> None:
        """Tokens and rows by reason are what the plans say; ranks compute again exactly what counts as repair."""
        work, model = self.scheduler.work, self.work
        assert work.num_rows == model.rows.total()
        assert work.prefill_rows == model.rows["prefill"]
        counted = {
            "prefill": work.prefill_tokens,
            "decode": work.decode_tokens,
            "repair": work.repair_tokens,
            "recompute": work.recompute_tokens,
        }
        assert counted == {phase: model.tokens[phase] for phase in counted}
        assert work.preempted_tokens + work.swapped_tokens >= model.thrown_away
        assert work.repair_tokens <= self.scheduler.stats().repair_tokens

    def check_window_blocks(self) -> None:
        """Beyond what a sequence always holds, window blocks are bounded once for the engine, by tokens in flight."""
        config, cache = self.scheduler.config, self.scheduler.cache
        most = -(-config.max_num_batched_tokens // BLOCK) * (config.steps_in_flight or 1)
        running = [s.blocks for s in self.scheduler.by_request.values() if s.blocks]
        for group, retention in enumerate(cache.retentions):
            if not retention.keeps_everything:
                spec = retention.spec
                width = spec.window or spec.chunk or spec.ratio * (1 + spec.overlap)
                always = -(-width // BLOCK) + 1
                extra = sum(max(0, len(blocks.tables[group].run) - always) for blocks in running)
                assert extra <= most

    def check_idle(self) -> None:
        """After the last request: nothing is referenced, everything is cache or free, outcomes add up."""
        assert not self.scheduler.has_work
        assert not self.scheduler.admission.in_flight_prefixes.producer_by_digest
        if not self.has_run_out_of_memory:  # the model takes what a failed step was to compute as computed
            self.check_work()
        assert all(group.active_blocks == 0 for group in self.scheduler.stats().groups)
        self.scheduler.cache.evict_all()
        assert self.scheduler.stats().free_pages == self.scheduler.stats().num_pages
        host = self.scheduler.cache.tiers.host
        assert host.arena.num_free == host.arena.num_pages
