"""Defines `ForwardBatch`, the one argument of a forward pass: a step's tokens, block tables and caches.

Legend: T tokens, B sequences, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from transom_kernels.paged_attention.inputs import PagedBatch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer's K and V in the KV pool, [num_block_ids, block_size, num_kv_heads, size], strided by block.

    Quantised keys and values have scales, [num_block_ids, block_size, num_kv_heads] float32. If `hadamard`, the keys are stored
    multiplied by a Hadamard matrix (`transom_kernels.kv_write.Preparation` says why). Of a recurrent layer, `k` are its states,
    [num_block_ids, 1, num_heads, numbers], and `v` its convolution's last inputs, [num_block_ids, rows, channels].
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    hadamard: bool = False
    launches: dict[Any, Any] = field(default_factory=dict, compare=False)  # that operators have prepared for them


@dataclass(frozen=True, slots=True)
class CachePart:
    """One of the caches of a layer that has several, and the index of the group whose block tables it uses."""

    cache: LayerCache
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCache:
    """What a compressed attention layer keeps besides its keys and values.

    `entries` are the compressed entries, one tensor that is both K and V. `state` holds the compressor's kv of each token as K, and
    its gate as V. `index` is such a cache for the keys of the layer's indexer, which chooses the entries that a query reads; None
    if the layer has no indexer.
    """

    entries: CachePart
    state: CachePart
    index: CompressedCache | None = None


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """Everything that a model's forward pass reads besides its weights."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    groups: tuple[PagedBatch, ...]  # by KV cache group; a group of compressed entries counts entries, not tokens
    group_of_layer: tuple[int, ...]  # by layer: the KV cache group of its keys and values
    caches: tuple[LayerCache, ...]  # by layer: its keys and values
    logit_rows: torch.Tensor  # [R] int64, ascending: which of the T rows need logits
    compressed: tuple[CompressedCache | None, ...] = ()  # by layer; empty if no layer has one
    # [T] int32: the slots of the tokens' LoRA adapters, -1 for none; None: no token has an adapter.
    adapter_slots: torch.Tensor | None = None
    # [T] int64: the positions by which queries are rotated when they read sink tokens; None: `positions`.
    sink_positions: torch.Tensor | None = None
    # Called with each layer's index and output, [T, N], of the last layer [R, N], to find the layer whose recording is wrong.
    after_layer: Callable[[int, torch.Tensor], None] | None = None
