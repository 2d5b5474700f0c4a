"""The argument words of the CPU kernels of `paged_attention`. `policy_attention` and `latent_attention` share some of them.

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, B sequences, N table columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import CacheArguments, numbers_of


class ResultArguments(NamedTuple):
    """The words that the scores and the result of a row need; the kernel of `latent_attention` has them, too."""

    out: torch.Tensor | None  # [T, H, Dv], contiguous
    kv_heads: int
    scale: float
    soft_cap: float  # 0: none
    sink_logits: torch.Tensor | None  # [H]
    sink_stride: int  # bytes
    statistics: torch.Tensor | None  # [T, H, 2] float32: receives maximum and sum of each row's softmax


class WorkArguments(NamedTuple):
    """How the work of a step is cut into items (`launcher.Plan`). A sequence decodes, or is computed in tiles of its query tokens.

    `decode.py` defines slots and units.
    """

    tiles: torch.Tensor | None = None  # [tiles, 2] int32: sequence and first token of each tile of a prompt
    num_tile_items: int = 0  # items that compute tiles; the others decode
    decoding: torch.Tensor | None = None  # int32: numbers of the sequences that decode; None: all sequences
    num_slots: int = 1  # items that share the work of a decoding row and KV head
    max_units: int = 0  # partial results that a row and KV head may have
    # [T, KVH, max_units, floats of a partial result] float32, if slots share rows
    partials: torch.Tensor | None = None


class AttentionArguments(NamedTuple):
    """The words that `paged_attention` and `policy_attention` share. Tables, positions and offsets are int32."""

    result: ResultArguments
    q: torch.Tensor  # [T, H, D]
    sink_q: torch.Tensor | None  # [T, H, D]: queries for the sink tokens, with q's strides; None: q
    q_row: int  # strides in bytes
    q_head: int
    keys: CacheArguments
    values: CacheArguments
    key_scales: CacheArguments  # of quantised caches
    value_scales: CacheArguments
    block_table: torch.Tensor  # [B, N]
    columns: int  # N
    block_size: int
    start: torch.Tensor  # [B]: position of the first query
    query_offset: torch.Tensor  # [B + 1]: rows of sequence b are [query_offset[b], query_offset[b + 1])
    work: WorkArguments


class PagedArguments(NamedTuple):
    """The words that only `paged_attention` has, after `AttentionArguments`: its block tables, and the mask rule."""

    first_block: torch.Tensor  # [B]: logical block of the first column after the sink blocks
    attend_from: torch.Tensor  # [B]: first position whose key may be read; sink tokens are exempt
    num_sink_blocks: int
    window: int  # 0: none
    num_sink_tokens: int
    chunk: int  # 0: none


RESULT = numbers_of(ResultArguments)
AT = numbers_of(AttentionArguments)
PAGED = numbers_of(PagedArguments, after=AttentionArguments)
