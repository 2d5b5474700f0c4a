"""Plans for sequences with KV policies, written by a test: tables that lose blocks, masks, mass and measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tests.worker.execution.hand_scheduler import GREEDY, Blocks
from transom_core.contract import KvPolicy, WindowPolicy
from transom_worker.execution.runner import ModelRunner
from transom_worker.scheduling.step import NO_ID, WHOLE_TABLE, NewSequence, StepPlan, StepResult


class _Row:
    def __init__(self, policy: KvPolicy | None, tokens: list[int]) -> None:
        self.policy, self.tokens = policy, list(tokens)
        self.num_computed = 0
        self.held: dict[int, int] = {}


class PolicyScheduler:
    """Runs sequences of one full group on a runner; policies of type window slide, others keep what the test does not remove."""

    def __init__(self, runner: ModelRunner) -> None:
        (group,) = runner.info.layout.groups
        self.runner, self.size = runner, group.rows_per_block
        self.pool = Blocks(runner.info.layout)
        self.rows: dict[int, _Row] = {}
        self.removals: list[tuple[int, int]] = []
        self._new: list[NewSequence] = []
        self._step_ids = itertools.count()

    def add(self, seq_id: int, tokens: Sequence[int], policy: KvPolicy | None = None, *, quality: bool = False) -> None:
        self.rows[seq_id] = _Row(policy, list(tokens))
        self._new.append(
            NewSequence(
                seq_id=seq_id, request_id=str(seq_id), token_ids=tuple(tokens), num_prompt_tokens=len(tokens),
                params=GREEDY, seed=0, kv_policy=policy, kv_quality=quality,
            )
        )  # fmt: skip

    def remove(self, seq_id: int, logical: int) -> None:
        """Take a block out of a table with the next step."""
        del self.rows[seq_id].held[logical]
        self.removals.append((seq_id, logical))

    def step(self, counts: dict[int, int], *, mass: bool = False, measure: bool = False) -> StepResult:
        """Compute tokens of each sequence; append what was sampled."""
        plan = StepPlan(step_id=next(self._step_ids), new_sequences=self._new, attend_from=[[]], write_from=[[]])
        self._new = []
        for seq_id, count in counts.items():
            self._plan_row(plan, seq_id, count)
        for seq_id, logical in self.removals:
            plan.removed_seq.append(seq_id)
            plan.removed_group.append(0)
            plan.removed_logical.append(logical)
        self.removals = []
        policies = [self.rows[seq_id].policy is not None for seq_id in counts]
        plan.wants_mass = [int(mass and policy) for policy in policies]
        plan.measure = [int(measure and policy) for policy in policies]
        result = self.runner.execute(plan)
        sampling = [seq_id for seq_id, sample in zip(counts, plan.sample, strict=True) if sample]
        for seq_id, token in zip(sampling, result.sampled_ids, strict=True):
            self.rows[seq_id].tokens.append(token)
        return result

    def decode(self, seq_id: int, num_tokens: int, **options: Any) -> list[StepResult]:
        return [self.step({seq_id: 1}, **options) for _ in range(num_tokens)]

    def _plan_row(self, plan: StepPlan, seq_id: int, count: int) -> None:
        row = self.rows[seq_id]
        start, end = row.num_computed, row.num_computed + count
        self._slide(plan, seq_id, row, start, end)
        samples = end == len(row.tokens)
        plan.seq_ids.append(seq_id)
        plan.start.append(start)
        plan.count.append(count)
        plan.input_id.append(row.tokens[-1] if samples and count == 1 else NO_ID)
        plan.input_row.append(NO_ID)
        plan.sample.append(int(samples))
        plan.logits_from.append(end - samples)
        plan.attend_from[0].append(0)
        plan.write_from[0].append(start)
        window = row.policy.window if isinstance(row.policy, WindowPolicy) else WHOLE_TABLE if row.policy else 0
        plan.row_window.append(window)
        plan.row_sinks.append(row.policy.sinks if row.policy else 0)
        row.num_computed = end

    def _slide(self, plan: StepPlan, seq_id: int, row: _Row, start: int, end: int) -> None:
        sink_blocks = -(-row.policy.sinks // self.size) if row.policy else 0
        dropped = []
        if isinstance(row.policy, WindowPolicy):
            first = max(0, start - row.policy.window + 1) // self.size
            dropped = [logical for logical in sorted(row.held) if sink_blocks <= logical < first]
        known = max([*row.held, *dropped, *(logical for _, logical in self.removals)], default=-1)
        for logical in dropped:
            del row.held[logical]
        new = list(range(max(known + 1, start // self.size), -(-end // self.size)))
        row.held.update(zip(new, self.pool.take(0, len(new)), strict=True))
        if new or dropped:
            plan.delta_seq.append(seq_id)
            plan.delta_group.append(0)
            plan.delta_dropped.append(len(dropped))
            run = [logical for logical in row.held if logical >= sink_blocks]
            plan.delta_first_block.append(min(run, default=sink_blocks))
            plan.delta_blocks += [row.held[logical] for logical in new]
            plan.delta_offset.append(len(plan.delta_blocks))
