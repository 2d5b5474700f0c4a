"""The kernel `combine` alone: fewer splits than an iteration reads, several iterations, and splits that saw no key."""

from __future__ import annotations

import math

import pytest
import torch

from transom_kernels.paged_attention.triton.combine import combine

SPLITS, KV_HEADS, GROUP, BLOCK_M, WIDTH = 41, 2, 3, 16, 20


def combine_triton(
    partial_out: torch.Tensor,
    partial_stats: torch.Tensor,
    out: torch.Tensor,
    combine_items: torch.Tensor,
    sinks: torch.Tensor,
) -> None:
    combine[(len(combine_items), GROUP, KV_HEADS)](
        partial_out, partial_stats, out, combine_items, sinks, KV_HEADS,
        GROUP=GROUP, E=WIDTH, HAS_SINK_LOGITS=True, BLOCK_M=BLOCK_M, BLOCK_E=32, BLOCK_S=16,
    )  # fmt: skip


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 16), (2, 17), (4, 37)])
def test_splits_of_a_row(first: int, count: int) -> None:
    values, heights = torch.randn(SPLITS, KV_HEADS, BLOCK_M, WIDTH), torch.randn(SPLITS, KV_HEADS, BLOCK_M) * 8
    sums, sinks = torch.rand(SPLITS, KV_HEADS, BLOCK_M) * 5 + 1, torch.randn(KV_HEADS * GROUP)
    heights[first + count // 2] = -torch.inf if count > 1 else 0.0  # a split without a visible key
    values[heights == -torch.inf], sums[heights == -torch.inf] = 0.0, 0.0
    values[first + count :] = torch.nan
    out = torch.full((1, KV_HEADS * GROUP, WIDTH), torch.nan)
    combine_items = torch.tensor([[0, 1, first, count]], dtype=torch.int32)
    combine_triton(values, torch.stack([heights, sums], dim=-1), out, combine_items, sinks)
    mine = slice(first, first + count)
    weights = torch.exp2(heights[mine].double())[:, :, :GROUP]
    sink = sinks.double().view(KV_HEADS, GROUP).exp()
    total = (weights * sums[mine, :, :GROUP].double()).sum(0) + sink
    wanted = (weights[..., None] * values[mine, :, :GROUP].double()).sum(0) / total[..., None]
    assert math.isfinite(float(out.sum()))
    torch.testing.assert_close(out[0].double(), wanted.flatten(0, 1), atol=1e-5, rtol=1e-5)
