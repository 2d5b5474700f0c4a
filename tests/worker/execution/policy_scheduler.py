"""Plans for sequences with KV policies, written by a test: tables that lose blocks, masks, mass and measurements."""

from collections.abc import Sequence
from typing import Any

from tests.worker.execution.hand_scheduler import HandScheduler, HandSequence
from transom_core.contract import KvPolicy, WindowPolicy
from transom_worker.execution.runner import ModelRunner
from transom_worker.scheduling.step import WHOLE_TABLE, StepPlan, StepResult


class PolicyScheduler(HandScheduler):
    """Runs sequences of one full group on a runner; policies of type window slide, others keep what the test does not remove."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner.info.layout)
        (group,) = self.layout.groups
        self.runner, self.size = runner, group.rows_per_block
        self.removals: list[tuple[int, int]] = []

    def add_row(
        self, seq_id: int, tokens: Sequence[int], policy: KvPolicy | None = None, *, quality: bool = False
    ) -> None:
        self.add(seq_id, list(tokens), kv_policy=policy, kv_quality=quality)

    def remove(self, seq_id: int, logical: int) -> None:
        """Take a block out of a table with the next step."""
        del self.sequences[seq_id].blocks[0][logical]
        self.removals.append((seq_id, logical))

    def step(self, counts: dict[int, int], *, mass: bool = False, measure: bool = False) -> StepResult:
        """Compute tokens of each sequence; append what was sampled."""
        plan = self.plan(counts)
        for seq_id, logical in self.removals:
            plan.removed_seq.append(seq_id)
            plan.removed_group.append(0)
            plan.removed_logical.append(logical)
        self.removals = []
        policies = [self.sequences[seq_id].new.kv_policy for seq_id in counts]
        windows = [policy.window if isinstance(policy, WindowPolicy) else WHOLE_TABLE for policy in policies]
        plan.row_window = [window if policy else 0 for policy, window in zip(policies, windows, strict=True)]
        plan.row_sinks = [policy.sinks if policy else 0 for policy in policies]
        plan.wants_mass = [int(mass and policy is not None) for policy in policies]
        plan.measure = [int(measure and policy is not None) for policy in policies]
        result = self.runner.execute(plan)
        self.received(plan, result)
        return result

    def decode(self, seq_id: int, num_tokens: int, **options: Any) -> list[StepResult]:
        return [self.step({seq_id: 1}, **options) for _ in range(num_tokens)]

    def _move_tables(self, plan: StepPlan, sequence: HandSequence, start: int, end: int) -> None:
        policy, held = sequence.new.kv_policy, sequence.blocks[0]
        sink_blocks = -(-policy.sinks // self.size) if policy else 0
        dropped = []
        if isinstance(policy, WindowPolicy):
            first = max(0, start - policy.window + 1) // self.size
            dropped = [logical for logical in sorted(held) if sink_blocks <= logical < first]
        known = max([*held, *(logical for _, logical in self.removals)], default=-1)
        for logical in dropped:
            del held[logical]
        new = range(max(known + 1, start // self.size), -(-end // self.size))
        run = min([logical for logical in (*held, *new) if logical >= sink_blocks], default=sink_blocks)
        self._add_delta(plan, sequence, 0, len(dropped), run, new)
