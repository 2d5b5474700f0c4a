"""Reports two things about a step's rows with KV policies: the attention mass of each block (the share of the queries' attention
probabilities that its keys got), and how much the policy changes the next token's distribution.

    report = PolicyReport(plan, arrays, store, builder)
    report.attach(batch)          an eager pass will add up mass, or
    report.take_mass(mass)        a replayed pass will add up mass here
    report.measure(model)         before the step's own pass
    report.fill(logits, result)   after it

A *measured* row, which samples a token, is computed twice. The first pass attends to all keys that still have their contents,
including those that the policy dropped; the second pass is the step's own. Both passes write the row's keys and values. The
measuring pass comes first, so that the cache keeps what the step's own pass writes.

Four indices count rows: `b` all rows of the plan, `p` those with KV policies, `s` those that sample a token, and `m` the measured
ones.

Legend: P policy rows, N table columns, M measured rows, V this rank's part of the vocabulary, W the whole vocabulary.
"""

from functools import partial

import numpy as np
import torch

from transom_core.model_config.architecture import Architecture
from transom_worker.execution.batch.batch import BatchBuilder, MeasuredRows
from transom_worker.execution.batch.policy_arrays import policy_arrays
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.batch.step_arrays import StepArrays
from transom_worker.execution.step_sampling import StepLogits
from transom_worker.models.layers.forward_batch import ForwardBatch
from transom_worker.models.layers.policy_rows import MassMeter, MixedBatch
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.sampling.sharded import ShardedSampler
from transom_worker.scheduling.step import PolicyQuality, StepPlan, StepResult


class PolicyReport:
    """Measures one step. All ranks do the same, since its passes and sums contain collectives; only rank 0 reports the quality."""

    def __init__(self, plan: StepPlan, arrays: StepArrays, store: SequenceStore, builder: BatchBuilder) -> None:
        policies = arrays.groups[0].policies
        assert policies is not None
        self._plan, self._policies = plan, policies
        self._measured = [b for b, measure in enumerate(plan.measure) if measure and plan.sample[b]]  # m -> b
        self._block_mass_PN: torch.Tensor | None = None
        self._full_MV: torch.Tensor | None = None  # logits of the pass that attends to everything
        self._dropped_M = torch.zeros(len(self._measured), dtype=torch.float32, device=builder.device)
        self._measuring_batch = _measuring_batch(plan, arrays, store, builder, self._measured, self._dropped_M)

    @property
    def wants_mass(self) -> bool:
        """Return whether some row must report its attention mass."""
        return any(self._plan.wants_mass)

    def attach(self, batch: ForwardBatch) -> None:
        """Let an eager pass of the step add up attention mass, if a row wants it."""
        if not self.wants_mass:
            return
        self._block_mass_PN = None
        for group in batch.groups:
            if isinstance(group, MixedBatch):
                if self._block_mass_PN is None:
                    self._block_mass_PN = torch.zeros_like(group.policies.block_table, dtype=torch.float32)
                group.meter = MassMeter(block_mass=self._block_mass_PN)

    def take_mass(self, block_mass: torch.Tensor | None) -> None:
        """Report the mass that a replayed step adds up in `block_mass`. Its shape is [P, N], padded at the ends of both axes."""
        self._block_mass_PN = block_mass

    def measure(self, model: Model) -> None:
        """Run the pass that attends to everything, if a row is measured."""
        if self._measuring_batch is not None:
            self._full_MV = model.forward(self._measuring_batch).clone()

    def fill(
        self,
        logits: StepLogits,
        result: StepResult,
        *,
        architecture: Architecture,
        parallel: Parallel,
        sampler: ShardedSampler,
    ) -> None:
        """Write mass and quality into the result, after the step's own pass.

        Layers add up the probabilities of all their heads. So the mass, and the mass that the policy dropped, are divided by the
        number of heads of all layers; then 1.0 means all of a query's attention.
        """
        num_heads = sum(layer.num_heads for layer in architecture.layers)
        if self._block_mass_PN is not None:
            num_rows, num_columns = self._policies.block_table.shape
            mass_PN = self._block_mass_PN[:num_rows, :num_columns].contiguous()
            host_PN = (parallel.comm.all_reduce_(mass_PN) / num_heads).cpu().numpy()  # one wait for all rows
            for p, b in enumerate(self._policies.batch_rows):
                if self._plan.wants_mass[b]:
                    result.attention_mass[b] = host_PN[p, : self._policies.num_columns[p]].tolist()
        if self._full_MV is not None:
            dropped_M = parallel.comm.all_reduce_(self._dropped_M) / num_heads
            self._fill_quality(self._full_MV, dropped_M, logits, result, sampler)

    def _fill_quality(
        self,
        full_MV: torch.Tensor,
        dropped_M: torch.Tensor,
        logits: StepLogits,
        result: StepResult,
        sampler: ShardedSampler,
    ) -> None:
        """Compare the next token's distribution with the policy (p) and without it (q): write KL(q || p) and whether the top tokens
        agree into the result, and the mass that the policy dropped."""
        sampled = [b for b, sample in enumerate(self._plan.sample) if sample]  # s -> b
        policy_MW = sampler.gather_rows(logits.sampled_SV, [sampled.index(b) for b in self._measured])
        full_MW = sampler.gather_rows(full_MV, range(len(self._measured)))
        if policy_MW is None or full_MW is None:  # not rank 0
            return
        # The KL is in float64 and in nats; `nan_to_num` turns 0 * (-inf - -inf), of tokens that neither can sample, into 0.
        log_p, log_q = policy_MW.double().log_softmax(-1), full_MW.double().log_softmax(-1)
        kl_M = (log_q.exp() * (log_q - log_p)).nan_to_num(0.0).sum(-1).clamp(min=0.0)
        agrees_M = log_p.argmax(-1) == log_q.argmax(-1)
        numbers_3M = torch.stack([kl_M, agrees_M.double(), dropped_M.double().nan_to_num(0.0).clamp(0.0, 1.0)]).tolist()
        for b, kl, agrees, dropped in zip(self._measured, *numbers_3M, strict=True):
            result.quality[b] = PolicyQuality(kl=kl, top_token_agrees=bool(agrees), dropped_mass=dropped)


def _measuring_batch(
    plan: StepPlan,
    arrays: StepArrays,
    store: SequenceStore,
    builder: BatchBuilder,
    measured: list[int],
    dropped_M: torch.Tensor,
) -> ForwardBatch | None:
    """Return a batch of only the measured rows, which attend to all keys; None if there are none.

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
    tokens = [int(arrays.rows.offset[b]) for b in measured]  # m -> query token of the step
    groups = []
    for index, group in enumerate(arrays.groups):
        tables = [compact[index] for b in measured if (compact := store[plan.seq_ids[b]].compact) is not None]
        one_token_each = partial(
            policy_arrays,
            sinks=[plan.row_sinks[b] for b in measured],
            block_size=group.block_size,
            start=[plan.start[b] for b in measured],
            count=[1] * len(measured),
            batch_rows=measured,
            token_rows=np.arange(len(measured)),
        )
        whole_tables = [table.with_gone() for table in tables]
        groups.append(
            MeasuredRows(
                slots=group.slots[tokens],
                everything=one_token_each(whole_tables, window=[0] * len(measured)),
                masked=one_token_each(tables, window=[plan.row_window[b] for b in measured]),
            )
        )
    return builder.measured_batch(arrays, tokens, groups, dropped_M)
