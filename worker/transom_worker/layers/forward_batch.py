"""The one argument of a forward pass.

Legend: T tokens, B sequences, R rows whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.paged_attention.batch import PagedBatch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer's K and V in the slab, [num_block_ids, block_size, num_kv_heads, size], strided by block."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """All that a model's forward pass reads besides its weights."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    groups: tuple[PagedBatch, ...]  # by group index
    group_of_layer: tuple[int, ...]  # by layer
    caches: tuple[LayerCache, ...]  # by layer
    logit_rows: torch.Tensor  # [R] int64, rows of T
