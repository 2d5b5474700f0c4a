"""Launches the CPU kernels of `paged_attention`, straight on the blocks of the KV cache.

A step is planned once for all layers (`_plan`): tiles of prompts, and sequences that decode. A batch without host lists, which is
a recorded decode step, has no tiles: its launches depend on shapes alone, and the kernels read the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from transom_kernels.cpu.kernel import CpuKernel, cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.pool import pool
from transom_kernels.cpu.recording import Argument
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.block_lookup import physical_blocks
from transom_kernels.paged_attention.cpu_layout import (
    MAX_DECODING_ROWS,
    UNIT_KEYS,
    DecodeLayout,
    PromptLayout,
    partial_floats,
)
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.quantised_kv import STORED, head_width

_ITEMS_PER_THREAD = 4  # slots share decoding rows until there are so many items
_MAX_PARTIAL_BYTES = 64 << 20


def fits_cpu_kernel(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sink_logits: torch.Tensor | None
) -> bool:
    """Whether the kernels take these tensors: the elements of a key and of a value must be adjacent."""
    adjacent = all(cache.stride(-1) == 1 or cache.shape[-1] == 1 for cache in (k_cache, v_cache))
    return (
        adjacent
        and q.dtype in DTYPES
        and k_cache.dtype in STORED
        and (sink_logits is None or sink_logits.dtype in DTYPES)
    )


def paged_attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    rule: MaskRule,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The contract is that of `op.paged_attention`, with the mask's options in `rule`."""
    q = q if q.stride(2) == 1 else q.contiguous()
    rows, heads, width = q.shape
    kv_heads, value_width = v_cache.shape[2], head_width(v_cache)
    out = empty((rows, heads, value_width), q.dtype)
    if out.numel() == 0:
        return out
    kernels = _kernels(
        DTYPES[q.dtype],
        STORED[k_cache.dtype],
        heads // kv_heads,
        width,
        value_width,
        soft_cap is not None,
        None if sink_logits is None else DTYPES[sink_logits.dtype],
    )
    plan = _plan_of(batch, rule, kernels.tile_tokens)
    max_units = _max_units(batch, rule)
    num_slots = _num_slots(plan.num_decoding * kv_heads, max_units, 4 * rows * kv_heads * kernels.partial_floats)
    partials = None
    if num_slots > 1:
        partials = empty((rows * kv_heads * max_units * kernels.partial_floats,), torch.float32)
    num_tile_items = plan.num_tiles * kv_heads
    size = q.element_size()
    arguments: list[Argument] = [
        q, k_cache, v_cache, out, partials, sink_logits,
        batch.block_table, batch.first_block, batch.attend_from, batch.start, batch.query_offset,
        plan.tiles, num_tile_items,
        plan.decoding, num_slots, max_units,
        batch.block_table.shape[1], batch.block_size, batch.num_sink_blocks,
        rule.window or 0, rule.num_sink_tokens, rule.chunk or 0,
        q.stride(0) * size, q.stride(1) * size, *strides_of(k_cache), *strides_of(v_cache),
        0 if sink_logits is None else sink_logits.stride(0) * sink_logits.element_size(),
        kv_heads, float(scale), float(soft_cap or 0.0),
        *(word for scales in kv_scales or () for word in (scales, *strides_of(scales))),
    ]  # fmt: skip
    num_items = num_tile_items + plan.num_decoding * num_slots * kv_heads
    launch(kernels.attend, num_items, arguments, scratch_bytes=kernels.scratch_bytes)
    if num_slots > 1:
        launch(kernels.combine, plan.num_decoding * kv_heads, arguments)
    return out


def strides_of(cache: torch.Tensor) -> tuple[int, int, int]:
    """The strides of blocks, tokens and heads of a cache or its scales, in bytes."""
    block, token, head = cache.stride()[:3]
    size = cache.element_size()
    return block * size, token * size, head * size


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of one kind of layer, and their sizes."""

    attend: CpuKernel
    combine: CpuKernel
    tile_tokens: int  # query tokens of a prompt's tile
    partial_floats: int  # of a unit's partial result of one KV head
    scratch_bytes: int


@cache
def _kernels(
    dtype: str,
    stored: str,
    group: int,
    width: int,
    value_width: int,
    has_soft_cap: bool,
    sink_dtype: str | None,
) -> _Kernels:
    decode, prompt = DecodeLayout(dtype, group, width, value_width), PromptLayout(dtype, group, width, value_width)
    attend, combine = (
        cpu_kernel(
            "transom_kernels.paged_attention.cpu_kernel",
            maker,
            dtype=dtype,
            stored=stored,
            group=group,
            width=width,
            value_width=value_width,
            has_soft_cap=has_soft_cap,
            sink_dtype=sink_dtype,
        )
        for maker in ("make_attend", "make_combine")
    )
    return _Kernels(
        attend=attend,
        combine=combine,
        tile_tokens=prompt.tokens,
        partial_floats=partial_floats(dtype, group, value_width),
        scratch_bytes=max(decode.num_bytes, prompt.num_bytes),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which sequences are computed in tiles, and which row by row."""

    tiles: torch.Tensor | None  # [num_tiles, 2] int32: sequence and first token
    num_tiles: int
    decoding: torch.Tensor | None  # [num_decoding] int32: their numbers; None: all sequences
    num_decoding: int


def _plan_of(batch: PagedBatch, rule: MaskRule, tile_tokens: int) -> _Plan:
    """The step's plan. The first layer makes it; the batch keeps it for the others."""
    kept = batch.scratch.setdefault("paged_attention_cpu", {})
    if ("checked", rule) not in kept:
        _check_blocks(batch, rule)
        kept["checked", rule] = True
    if tile_tokens not in kept:
        kept[tile_tokens] = _plan(batch, tile_tokens)
    plan: _Plan = kept[tile_tokens]
    return plan


def _plan(batch: PagedBatch, tile_tokens: int) -> _Plan:
    """Cut prompts into tiles, those with the most keys first, so that no thread begins a long one last."""
    prompts = [b for b, count in enumerate(batch.count_host) if count > MAX_DECODING_ROWS]
    num_decoding = batch.start.shape[0] - len(prompts)
    if not prompts:
        return _Plan(tiles=None, num_tiles=0, decoding=None, num_decoding=num_decoding)
    tiles = [(b, token) for b in prompts for token in range(0, batch.count_host[b], tile_tokens)]
    tiles.sort(key=lambda tile: -batch.start_host[tile[0]] - tile[1])
    decoding = np.setdiff1d(np.arange(batch.start.shape[0], dtype=np.int32), np.array(prompts, dtype=np.int32))
    return _Plan(
        tiles=torch.tensor(tiles, dtype=torch.int32),
        num_tiles=len(tiles),
        decoding=torch.from_numpy(decoding),
        num_decoding=num_decoding,
    )


def _check_blocks(batch: PagedBatch, rule: MaskRule) -> None:
    """Find sequences whose table lacks the block of a visible key, where the host knows the numbers.

    Raises:
        IndexError: there is one.
    """
    size = batch.block_size
    if not batch.block_table_host:
        return
    for b, count in enumerate(batch.count_host):
        end = batch.start_host[b] + count
        low = min(rule.first_key(batch.start_host[b], batch.attend_from_host[b]), end)
        if count and low < end:
            physical_blocks(batch, b, low // size, -(-end // size))
        sinks = min(rule.num_sink_tokens, end, low) if count else 0
        if sinks:
            physical_blocks(batch, b, 0, -(-sinks // size))


def _max_units(batch: PagedBatch, rule: MaskRule) -> int:
    """The most units that a row can have."""
    num_keys = batch.block_table.shape[1] * batch.block_size
    if rule.window is not None:
        num_keys = min(num_keys, rule.window + rule.num_sink_tokens)
    return num_keys // UNIT_KEYS + 3  # keys may begin and end inside a unit, and sink tokens have units of their own


def _num_slots(items: int, max_units: int, partial_bytes: int) -> int:
    """How many items share a decoding row."""
    wanted = -(-_ITEMS_PER_THREAD * pool().num_threads // max(1, items))
    slots = min(wanted, max_units - 2)
    return slots if slots > 1 and max_units * partial_bytes <= _MAX_PARTIAL_BYTES else 1
