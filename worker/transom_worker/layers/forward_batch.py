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


@dataclass(frozen=True, slots=True)
class CachePart:
    """A cache of a layer that has several, and the index of the group whose blocks it lies in."""

    cache: LayerCache
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCache:
    """What a layer that compresses keeps besides keys and values: entries (one tensor, K and V alike) and the compressor's
    (kv, gate) as K and V by token; likewise for the keys of its indexer, if it has one."""

    entries: CachePart
    state: CachePart
    index: CompressedCache | None = None


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """All that a model's forward pass reads besides its weights."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    groups: tuple[PagedBatch, ...]  # by group index; of compressed entries in entries, those that this step closes
    group_of_layer: tuple[int, ...]  # by layer: of its keys and values
    caches: tuple[LayerCache, ...]  # by layer: keys and values
    logit_rows: torch.Tensor  # [R] int64, rows of T
    compressed: tuple[CompressedCache | None, ...] = ()  # by layer, where a layer compresses; else empty
