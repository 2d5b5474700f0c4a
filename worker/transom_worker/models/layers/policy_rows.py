"""Attention for a step in which some requests have KV policies.

A *policy row* is a query token of such a request. Policy rows read compact block tables with masks of their own, and the other rows
read the step's ordinary block tables.

Legend: T query tokens of the step, P policy rows, O other rows, B sequences with policy rows, N table columns, H query heads, Dv
value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention import paged_attention
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.policy_attention import PolicyBatch, add_block_mass, empty_statistics, policy_attention
from transom_worker.models.layers.forward_batch import LayerCache


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
    without policies.
    """

    policies: PolicyBatch
    policy_rows: torch.Tensor | None  # [P] int64: which of the T tokens have policies; None: all
    other_rows: torch.Tensor | None  # [O] int64: which have none; None if all have policies
    meter: MassMeter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How a layer computes attention scores from queries and keys."""

    scale: float
    soft_cap: float | None
    sink_logits: torch.Tensor | None  # [H] float32, one learned sink for each of this rank's heads


def attend_mixed(
    q_THD: torch.Tensor, sink_q_THD: torch.Tensor | None, cache: LayerCache, batch: MixedBatch, options: ScoreOptions
) -> torch.Tensor:
    """Return attention outputs [T, H, Dv] of all rows; `sink_q`, if given, are the queries that read sink tokens instead of `q`."""
    if batch.policy_rows is None:
        return _attend_policies(q_THD, sink_q_THD, cache, batch, options)
    sink_q_PHD = None if sink_q_THD is None else sink_q_THD.index_select(0, batch.policy_rows)
    out_PHD = _attend_policies(q_THD.index_select(0, batch.policy_rows), sink_q_PHD, cache, batch, options)
    out_THD = out_PHD.new_empty(len(q_THD), *out_PHD.shape[1:])
    out_THD.index_copy_(0, batch.policy_rows, out_PHD)
    if batch.other_rows is not None:
        others = paged_attention(
            q_THD.index_select(0, batch.other_rows),
            cache.k,
            cache.v,
            batch,
            scale=options.scale,
            soft_cap=options.soft_cap,
            sink_logits=options.sink_logits,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        out_THD.index_copy_(0, batch.other_rows, others)
    return out_THD


def _attend_policies(
    q_PHD: torch.Tensor, sink_q_PHD: torch.Tensor | None, cache: LayerCache, batch: MixedBatch, options: ScoreOptions
) -> torch.Tensor:
    meter = batch.meter
    if meter is None:
        return _attention(q_PHD, sink_q_PHD, cache, batch.policies, options, None)
    statistics = empty_statistics(q_PHD)
    out_PHD = _attention(q_PHD, sink_q_PHD, cache, batch.policies, options, statistics)
    if meter.block_mass is not None:
        add_block_mass(
            meter.block_mass,
            q_PHD,
            cache.k,
            batch.policies,
            statistics,
            scale=options.scale,
            soft_cap=options.soft_cap,
            sink_q=sink_q_PHD,
            k_scale=cache.k_scale,
        )
    if meter.dropped is not None and meter.masked is not None:
        seen = empty_statistics(q_PHD)
        _attention(q_PHD, sink_q_PHD, cache, meter.masked, options, seen)
        (top, total), (seen_top, seen_total) = statistics.unbind(-1), seen.unbind(-1)
        # A row's statistics are (top, total): its largest score, and the sum of 2^(score - top). `seen_total` is rescaled to
        # `top`, so that its quotient with `total` is the probability of the keys that `masked` leaves.
        meter.dropped += (1.0 - seen_total * torch.exp2(seen_top - top) / total).sum(dim=1)
    return out_PHD


def _attention(
    q_PHD: torch.Tensor,
    sink_q_PHD: torch.Tensor | None,
    cache: LayerCache,
    policies: PolicyBatch,
    options: ScoreOptions,
    statistics: torch.Tensor | None,
) -> torch.Tensor:
    return policy_attention(
        q_PHD,
        cache.k,
        cache.v,
        policies,
        scale=options.scale,
        soft_cap=options.soft_cap,
        sink_logits=options.sink_logits,
        sink_q=sink_q_PHD,
        statistics=statistics,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
