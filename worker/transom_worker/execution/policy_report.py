"""What a step reports of its rows with KV policies: attention mass by block, and how far the policy moves the next token.

A *measured* row, which samples a token, is computed twice. The first pass attends to all keys that still have their contents,
those that the policy dropped included; the second is the step's own. Both write the row's keys and values, so that those of the
second pass stay.

Legend: B policy rows, N table columns, M measured rows, V this rank's part of the vocabulary, W the whole vocabulary.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from transom_core.model_config.architecture import Architecture
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.batch.policy_arrays import RowMask, policy_arrays
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.step_logits import StepLogits
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MassMeter, MixedBatch
from transom_worker.models.model import Model
from transom_worker.models.parallel import Parallel
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import PolicyQuality, StepPlan, StepResult


class PolicyReport:
    """Measures one step. All ranks do the same, since its passes and sums contain collectives; only rank 0 reports."""

    def __init__(self, plan: StepPlan, arrays: StepArrays, store: SequenceStore, builder: BatchBuilder) -> None:
        policies = arrays.groups[0].policies
        assert policies is not None
        self._plan, self._policies = plan, policies
        self._measured = [b for b, measure in enumerate(plan.measure) if measure and plan.sample[b]]
        self._block_mass: torch.Tensor | None = None
        self._full_MV: torch.Tensor | None = None
        self._dropped = torch.zeros(len(self._measured), dtype=torch.float32, device=builder.device)
        self._second = _measured_batch(plan, arrays, store, builder, self._measured, self._dropped)

    @property
    def wants_mass(self) -> bool:
        """Whether some row must report its attention mass."""
        return any(self._plan.wants_mass)

    def attach(self, batch: ForwardBatch) -> None:
        """Let a forward pass of the step add up attention mass, if a row wants it."""
        if not self.wants_mass:
            return
        self._block_mass = None
        for group in batch.groups:
            if isinstance(group, MixedBatch):
                if self._block_mass is None:
                    shape, device = group.policies.block_table.shape, group.policies.block_table.device
                    self._block_mass = torch.zeros(shape, dtype=torch.float32, device=device)
                group.meter = MassMeter(block_mass=self._block_mass)

    def take_mass(self, block_mass: torch.Tensor) -> None:
        """Report this mass [B or more, N or more], which a recorded step adds up."""
        self._block_mass = block_mass

    def measure(self, model: Model) -> None:
        """Run the pass that attends to everything. It comes before the step's own pass, which overwrites what it writes."""
        if self._second is not None:
            self._full_MV = model.forward(self._second).clone()

    def fill(
        self,
        logits: StepLogits,
        result: StepResult,
        *,
        architecture: Architecture,
        parallel: Parallel,
        sampler: ShardedSampler,
    ) -> None:
        """Write mass and quality into the result, behind the step's own pass."""
        heads = sum(layer.num_heads for layer in architecture.layers)
        if self._block_mass is not None:
            columns = self._policies.block_table.shape[1]
            mass = self._block_mass[: len(self._policies.batch_rows), :columns].contiguous()
            mass = parallel.comm.all_reduce_(mass) / heads
            for row, b in enumerate(self._policies.batch_rows):
                if self._plan.wants_mass[b]:
                    result.attention_mass[b] = mass[row, : self._policies.num_columns[row]].tolist()
        if self._full_MV is not None:
            self._fill_quality(logits, result, heads, parallel, sampler)

    def _fill_quality(
        self, logits: StepLogits, result: StepResult, heads: int, parallel: Parallel, sampler: ShardedSampler
    ) -> None:
        assert self._full_MV is not None
        sampled = [b for b, sample in enumerate(self._plan.sample) if sample]
        rows = [sampled.index(b) for b in self._measured]
        dropped = parallel.comm.all_reduce_(self._dropped) / heads
        policy_MW = sampler.gather_rows(logits.sampled_SV, rows)
        full_MW = sampler.gather_rows(self._full_MV, range(len(rows)))
        if policy_MW is None or full_MW is None:  # not rank 0
            return
        log_p, log_q = policy_MW.double().log_softmax(-1), full_MW.double().log_softmax(-1)
        kl = (log_q.exp() * (log_q - log_p)).nan_to_num(0.0).sum(-1).clamp(min=0.0)
        agrees = log_p.argmax(-1) == log_q.argmax(-1)
        for index, b in enumerate(self._measured):
            result.quality[b] = PolicyQuality(
                kl=float(kl[index]),
                top_token_agrees=bool(agrees[index]),
                dropped_mass=min(1.0, max(0.0, float(dropped[index]))),
            )


def _measured_batch(
    plan: StepPlan,
    arrays: StepArrays,
    store: SequenceStore,
    builder: BatchBuilder,
    measured: list[int],
    dropped: torch.Tensor,
) -> ForwardBatch | None:
    """The batch of the measured rows alone, which attends to everything; None without such rows.

    Raises:
        ValueError: a measured row has no KV policy, or has several tokens.
    """
    if not measured:
        return None
    for b in measured:
        if plan.count[b] != 1 or not plan.sample[b] or store[plan.seq_ids[b]].compact is None:
            raise ValueError(
                f"Batch row {b} is to be measured; it must sample one token of a sequence with a KV policy."
            )
    tokens = [int(arrays.rows.offset[b]) for b in measured]
    parts = []
    for index, group in enumerate(arrays.groups):
        tables = [compact[index] for b in measured if (compact := store[plan.seq_ids[b]].compact) is not None]
        masks = [RowMask(window=plan.row_window[b], sinks=plan.row_sinks[b]) for b in measured]
        one_token_each = partial(
            policy_arrays,
            block_size=group.block_size,
            start=[plan.start[b] for b in measured],
            count=[1] * len(measured),
            batch_rows=measured,
            token_rows=np.arange(len(measured)),
        )
        everything = [RowMask(window=0, sinks=mask.sinks) for mask in masks]
        whole = one_token_each([table.with_gone() for table in tables], everything)
        parts.append((group.slots[tokens], whole, one_token_each(tables, masks)))
    return builder.measured_batch(arrays, tokens, parts, dropped)
