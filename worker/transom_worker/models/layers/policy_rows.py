"""Attention for a step in which some requests have KV policies.

A *policy row* is a query token of such a request. Policy rows read compact block tables, which have only the blocks that the policy
keeps, and each request has its own mask (window and sinks). The other rows read the step's ordinary block tables.

Legend: T query tokens of the step, P policy rows, O other rows, B sequences with policy rows, N table columns, H query heads, Dv
value width.
"""

from dataclasses import dataclass, replace

import torch

from transom_kernels.paged_attention import MaskRule, PagedInputs, paged_attention
from transom_kernels.paged_attention.inputs import PagedBatch
from transom_kernels.policy_attention import (
    PolicyBatch,
    PolicyInputs,
    add_block_mass,
    empty_statistics,
    policy_attention,
)


@dataclass(slots=True, kw_only=True)
class MassMeter:
    """Sums of attention probability over this rank's layers and heads. Layers add to them while they compute policy rows.

    `block_mass` sums the probability of each block of each table (`add_block_mass`). `dropped` sums, for each policy row, the
    probability of the keys that the mask of `masked` hides and the batch's own mask does not.
    """

    block_mass: torch.Tensor | None = None  # [B, N] float32
    dropped: torch.Tensor | None = None  # [P] float32
    masked: PolicyBatch | None = None


@dataclass(slots=True, kw_only=True)
class MixedBatch(PagedBatch):
    """The metadata of a step with policy rows. Its `slots` are those of all rows; the other `PagedBatch` fields describe the rows
    without policies."""

    policies: PolicyBatch
    policy_rows: torch.Tensor | None  # [P] int64: which of the T tokens have policies; None: all
    other_rows: torch.Tensor | None  # [O] int64: which have none; None if all have policies
    meter: MassMeter | None = None


def attend_mixed(inputs: PagedInputs, batch: MixedBatch, sink_q_THD: torch.Tensor | None) -> torch.Tensor:
    """Return attention outputs [T, H, Dv] of all rows; `sink_q`, if given, are the queries that read sink tokens instead of `q`.

    `inputs` are those of a step without policies. Their mask rule is not used: all layers of models that take policies have full
    attention.
    """
    q_THD = inputs.q
    if batch.policy_rows is None:
        return _attend_policies(q_THD, sink_q_THD, inputs, batch)
    sink_q_PHD = None if sink_q_THD is None else sink_q_THD.index_select(0, batch.policy_rows)
    out_PHD = _attend_policies(q_THD.index_select(0, batch.policy_rows), sink_q_PHD, inputs, batch)
    out_THD = out_PHD.new_empty(len(q_THD), *out_PHD.shape[1:])
    out_THD.index_copy_(0, batch.policy_rows, out_PHD)
    if batch.other_rows is not None:
        others = replace(inputs, q=q_THD.index_select(0, batch.other_rows), rule=MaskRule())
        out_THD.index_copy_(0, batch.other_rows, paged_attention(others))
    return out_THD


def _attend_policies(
    q_PHD: torch.Tensor, sink_q_PHD: torch.Tensor | None, paged: PagedInputs, batch: MixedBatch
) -> torch.Tensor:
    meter = batch.meter
    inputs = PolicyInputs(
        q=q_PHD,
        k_cache=paged.k_cache,
        v_cache=paged.v_cache,
        batch=batch.policies,
        scale=paged.scale,
        soft_cap=paged.soft_cap,
        sink_logits=paged.sink_logits,
        k_scale=paged.k_scale,
        v_scale=paged.v_scale,
        sink_q=sink_q_PHD,
        statistics=None if meter is None else empty_statistics(q_PHD),
    )
    out_PHD = policy_attention(inputs)
    if meter is None or inputs.statistics is None:
        return out_PHD
    if meter.block_mass is not None:
        add_block_mass(meter.block_mass, inputs)
    if meter.dropped is not None and meter.masked is not None:
        seen = empty_statistics(q_PHD)
        policy_attention(replace(inputs, batch=meter.masked, statistics=seen))
        (top, total), (seen_top, seen_total) = inputs.statistics.unbind(-1), seen.unbind(-1)
        # A row's statistics are (top, total): its largest score, and the sum of 2^(score - top). `seen_total` is rescaled to
        # `top`, so that its quotient with `total` is the probability of the keys that `masked` leaves.
        meter.dropped += (1.0 - seen_total * torch.exp2(seen_top - top) / total).sum(dim=1)
    return out_PHD
