"""A scheduler for tests: allocates blocks in order, slides windows, and writes the plans that a test asks for."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transom_core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from transom_core.contract import SamplingParams
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.execution.runner import ModelRunner
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.scheduling.step import NO_ID, NewSequence, StepPlan, StepResult

GREEDY = SamplingParams(temperature=0.0)


def engine_config(model: Path | str, *, pool_bytes: int = 2**19, host_bytes: int = 0, **settings: Any) -> EngineConfig:
    """Return the config of a small pool with blocks of 4 tokens; `settings` are fields of `ModelConfig`."""
    return EngineConfig(
        model=ModelConfig(model=str(model), device="cpu", **settings),
        cache=CacheConfig(block_size=4, kv_cache_memory_bytes=pool_bytes, swap_space_bytes=host_bytes),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        num_threads=1,
    )


def make_runner(
    config: EngineConfig, parallel: Parallel | None = None, on_busy: Callable[[], None] = lambda: None
) -> ModelRunner:
    """Return a rank's runner."""
    setup = ModelSetup(config, parallel or Parallel(), on_busy=on_busy)
    return setup.allocate(setup.pool_bytes())


class Blocks:
    """Every group leases pages in turn, one group a page."""

    def __init__(self, layout: ArenaLayout) -> None:
        groups = range(len(layout.groups))
        pages = {g: range(g, layout.num_pages, len(layout.groups)) for g in groups}
        ids = {
            g: [b for page in pages[g] for b in range(layout.first_block(page, g), layout.end_block(page, g))]
            for g in groups
        }
        self._free = {g: iter(ids[g]) for g in groups}

    def take(self, group: int, count: int) -> list[int]:
        return list(itertools.islice(self._free[group], count))


class HandSequence:
    def __init__(self, new: NewSequence, num_groups: int) -> None:
        self.new = new
        self.tokens = list(new.token_ids)
        self.num_computed = 0
        self.num_known = len(new.token_ids)
        self.blocks: list[dict[int, int]] = [{} for _ in range(num_groups)]  # by group: logical to id
        self.last_row = NO_ID
        self.next_id = NO_ID


class HandScheduler:
    """Plans for sequences that the test advances as it likes."""

    def __init__(self, layout: ArenaLayout) -> None:
        self.layout = layout
        self.specs = [group.spec for group in layout.groups]
        self.pool = Blocks(layout)
        self.sequences: dict[int, HandSequence] = {}
        self._step_ids = itertools.count()
        self._new: list[NewSequence] = []
        self._finished: list[int] = []

    def add(self, seq_id: int, tokens: list[int], *, params: SamplingParams = GREEDY, **policy: Any) -> HandSequence:
        new = NewSequence(
            seq_id=seq_id,
            request_id=str(seq_id),
            token_ids=tuple(tokens),
            num_prompt_tokens=len(tokens),
            params=params,
            seed=0,
            **policy,
        )
        self.sequences[seq_id] = HandSequence(new, len(self.specs))
        self._new.append(new)
        return self.sequences[seq_id]

    def finish(self, seq_id: int) -> None:
        del self.sequences[seq_id]
        self._finished.append(seq_id)

    def plan(self, counts: dict[int, int], *, by_row: bool = False) -> StepPlan:
        """Compute `counts` tokens of each sequence; sample where all known tokens are computed then."""
        plan = StepPlan(step_id=next(self._step_ids), new_sequences=self._new, finished=self._finished)
        plan.attend_from = [[] for _ in self.specs]
        plan.write_from = [[] for _ in self.specs]
        self._new, self._finished = [], []
        rows = {}
        for b, (seq_id, count) in enumerate(counts.items()):
            rows[seq_id] = b
            self._schedule(plan, self.sequences[seq_id], count, by_row=by_row)
        for seq_id, sequence in self.sequences.items():
            sequence.last_row = rows.get(seq_id, NO_ID)
        return plan

    def run(self, runner: ModelRunner, *steps: dict[int, int]) -> None:
        """Let `runner` compute steps of these counts."""
        for counts in steps:
            plan = self.plan(counts)
            self.received(plan, runner.execute(plan))

    def received(self, plan: StepPlan, result: StepResult) -> dict[int, int]:
        """Remember sampled ids; returns them by sequence."""
        sampling = [seq_id for seq_id, sample in zip(plan.seq_ids, plan.sample, strict=True) if sample]
        sampled = dict(zip(sampling, result.sampled_ids, strict=True))
        for seq_id, token in sampled.items():
            if seq_id in self.sequences:
                self.sequences[seq_id].next_id = token
                self.sequences[seq_id].tokens.append(token)
        return sampled

    def _schedule(self, plan: StepPlan, sequence: HandSequence, count: int, *, by_row: bool) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        is_new = end == sequence.num_known + 1
        assert end <= sequence.num_known + 1
        self._move_tables(plan, sequence, start, end)
        plan.seq_ids.append(sequence.new.seq_id)
        plan.start.append(start)
        plan.count.append(count)
        plan.input_id.append(sequence.next_id if is_new and not by_row else NO_ID)
        plan.input_row.append(sequence.last_row if is_new and by_row else NO_ID)
        sequence.num_known += is_new
        sampling = end == sequence.num_known
        plan.sample.append(int(sampling))
        prompt_rows = sequence.new.params.prompt_logprobs is not None and start < sequence.new.num_prompt_tokens
        plan.logits_from.append(start if prompt_rows else end - sampling)
        for group in range(len(self.specs)):
            plan.attend_from[group].append(0)
            plan.write_from[group].append(start)
        sequence.num_computed = end

    def _move_tables(self, plan: StepPlan, sequence: HandSequence, start: int, end: int) -> None:
        for group, spec in enumerate(self.specs):
            held = sequence.blocks[group]
            needed = {p // spec.block_size for a, b in spec.live(start) for p in range(a, b)}
            pinned = spec.num_sink_blocks
            dropped = sorted(
                block for block in held if block not in needed and pinned <= block < start // spec.block_size
            )
            for block in dropped:
                del held[block]
            first_new = max(held, default=-1) + 1
            new = range(first_new, -(-end // spec.block_size))
            run = min((block for block in (*held, *new) if block >= pinned), default=pinned)
            self._add_delta(plan, sequence, group, len(dropped), run, new)

    def _add_delta(
        self, plan: StepPlan, sequence: HandSequence, group: int, num_dropped: int, first_block: int, new: range
    ) -> None:
        held = sequence.blocks[group]
        held.update(zip(new, self.pool.take(group, len(new)), strict=True))
        if new or num_dropped:
            plan.delta_seq.append(sequence.new.seq_id)
            plan.delta_group.append(group)
            plan.delta_dropped.append(num_dropped)
            plan.delta_first_block.append(first_block)
            plan.delta_blocks += [held[block] for block in new]
            plan.delta_offset.append(len(plan.delta_blocks))
