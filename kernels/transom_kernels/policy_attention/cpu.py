"""Launches the CPU kernels of `policy_attention`, straight on the blocks of the KV cache.

The number of launched items depends on shapes alone, and the kernels read all numbers of a step from tensors, so that decode
steps can be recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.pool import pool
from transom_kernels.cpu.recording import Argument
from transom_kernels.paged_attention import cpu_arguments as shared
from transom_kernels.paged_attention.cpu_layout import (
    MAX_DECODING_ROWS,
    UNIT_KEYS,
    DecodeLayout,
    PromptLayout,
    partial_floats,
)
from transom_kernels.policy_attention import cpu_arguments as own
from transom_kernels.policy_attention.batch import PolicyBatch
from transom_kernels.quantised_kv import STORED, head_width

_MODULE = "transom_kernels.policy_attention.cpu_kernel"
_ITEMS_PER_THREAD = 4  # slots share decoding rows until there are so many items
_MAX_PARTIAL_BYTES = 64 << 20
_EXTRA_BYTES = 64 + 4 * UNIT_KEYS  # `cpu_kernel.EXTRA_BYTES`, which is imported for compiling alone


def fits_cpu_kernel(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sink_logits: torch.Tensor | None
) -> bool:
    """Whether the kernels take these tensors: the elements of a key and of a value must be adjacent."""
    adjacent = all(cache.stride(-1) == 1 or cache.shape[-1] == 1 for cache in (k_cache, v_cache))
    has_dtypes = q.dtype in DTYPES and (sink_logits is None or sink_logits.dtype in DTYPES)
    return adjacent and has_dtypes and k_cache.dtype in STORED


def policy_attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PolicyBatch,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sink_q: torch.Tensor | None = None,
    statistics: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The contract is that of `op.policy_attention`."""
    rows, heads, width = q.shape
    kv_heads, value_width = v_cache.shape[2], head_width(v_cache)
    out = empty((rows, heads, value_width), q.dtype)
    if out.numel() == 0:
        return out
    dtype, group = DTYPES[q.dtype], heads // kv_heads
    floats = partial_floats(dtype, group, value_width)
    prompt = PromptLayout(dtype, group, width, value_width)
    plan = _plan_of(batch, prompt.tokens)
    max_units = batch.block_table.shape[1] * batch.block_size // UNIT_KEYS + 3
    num_slots = _num_slots(plan.num_decoding * kv_heads, max_units, 4 * rows * kv_heads * floats)
    partials = empty((rows * kv_heads * max_units * floats,), torch.float32) if num_slots > 1 else None
    arguments = _arguments(q, k_cache, v_cache, batch, scale, soft_cap, sink_q, statistics, (k_scale, v_scale))
    for at, value in (
        (shared.OUT, out),
        (shared.PARTIALS, partials),
        (shared.SINK_LOGITS, sink_logits),
        (shared.SINK_STRIDE, 0 if sink_logits is None else sink_logits.stride(0) * sink_logits.element_size()),
        (shared.TILES, plan.tiles),
        (shared.NUM_TILE_ITEMS, plan.num_tiles * kv_heads),
        (shared.DECODING, plan.decoding),
        (shared.NUM_SLOTS, num_slots),
        (shared.MAX_UNITS, max_units),
    ):
        arguments[at] = value
    attend, combine = (
        cpu_kernel(
            _MODULE,
            maker,
            dtype=dtype,
            stored=STORED[k_cache.dtype],
            group=group,
            width=width,
            value_width=value_width,
            has_soft_cap=soft_cap is not None,
            sink_dtype=None if sink_logits is None else DTYPES[sink_logits.dtype],
        )
        for maker in ("make_attend", "make_combine")
    )
    scratch_bytes = max(DecodeLayout(dtype, group, width, value_width).num_bytes, prompt.num_bytes) + _EXTRA_BYTES
    num_items = (plan.num_tiles + plan.num_decoding * num_slots) * kv_heads
    launch(attend, num_items, arguments, scratch_bytes=scratch_bytes)
    if num_slots > 1:
        launch(combine, plan.num_decoding * kv_heads, arguments)
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which sequences are computed in tiles, and which query rows one by one."""

    tiles: torch.Tensor | None  # [num_tiles, 2] int32: sequence and first token
    num_tiles: int
    decoding: torch.Tensor | None  # [num_decoding] int32: rows; None: all
    num_decoding: int


def _plan_of(batch: PolicyBatch, tile_tokens: int) -> _Plan:
    """The step's plan. The first layer makes it; the batch keeps it for the others."""
    key = ("policy_attention_cpu", tile_tokens)
    if key not in batch.scratch:
        batch.scratch[key] = _plan(batch, tile_tokens)
    plan: _Plan = batch.scratch[key]
    return plan


def _plan(batch: PolicyBatch, tile_tokens: int) -> _Plan:
    """Cut prompts into tiles, those with the most keys first, so that no thread begins a long one last."""
    prompts = [b for b, count in enumerate(batch.count_host) if count > MAX_DECODING_ROWS]
    if not prompts:
        return _Plan(tiles=None, num_tiles=0, decoding=None, num_decoding=batch.row_sequence.shape[0])
    tiles = [(b, token) for b in prompts for token in range(0, batch.count_host[b], tile_tokens)]
    starts = batch.start.tolist()
    tiles.sort(key=lambda tile: -starts[tile[0]] - tile[1])
    in_prompt = torch.isin(batch.row_sequence, torch.tensor(prompts, dtype=torch.int32))
    decoding = (~in_prompt).nonzero().flatten().int()
    return _Plan(
        tiles=torch.tensor(tiles, dtype=torch.int32),
        num_tiles=len(tiles),
        decoding=decoding,
        num_decoding=len(decoding),
    )


def add_block_mass_cpu(
    mass: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    batch: PolicyBatch,
    statistics: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_q: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> None:
    """The contract is that of `op.add_block_mass`."""
    num_sequences, columns = mass.shape
    dtype, group, width = DTYPES[q.dtype], q.shape[1] // k_cache.shape[2], q.shape[2]
    units = -(-columns * batch.block_size // UNIT_KEYS)
    arguments = _arguments(q, k_cache, k_cache, batch, scale, soft_cap, sink_q, statistics, (k_scale, k_scale))
    arguments[own.MASS], arguments[own.MASS_UNITS] = mass, units
    kernel = cpu_kernel(
        _MODULE,
        "make_add_mass",
        dtype=dtype,
        stored=STORED[k_cache.dtype],
        group=group,
        width=width,
        has_soft_cap=soft_cap is not None,
    )
    scratch_bytes = DecodeLayout(dtype, group, width, width).num_bytes + _EXTRA_BYTES
    launch(kernel, num_sequences * units, arguments, scratch_bytes=scratch_bytes)


def _arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PolicyBatch,
    scale: float,
    soft_cap: float | None,
    sink_q: torch.Tensor | None,
    statistics: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> list[Argument]:
    """The words that both operators read; the others are 0."""
    if q.stride(2) != 1 or (sink_q is not None and sink_q.stride() != q.stride()):
        raise ValueError("Queries must have adjacent elements, and both queries of a row the same strides.")
    arguments: list[Argument] = [0] * own.NUM_WORDS
    words: dict[int, Argument] = {
        shared.Q: q,
        shared.K_CACHE: k_cache,
        shared.V_CACHE: v_cache,
        shared.BLOCK_TABLE: batch.block_table,
        shared.START: batch.start,
        shared.QUERY_OFFSET: batch.query_offset,
        shared.COLUMNS: batch.block_table.shape[1],
        shared.BLOCK_SIZE: batch.block_size,
        shared.Q_ROW: q.stride(0) * q.element_size(),
        shared.Q_HEAD: q.stride(1) * q.element_size(),
        shared.KV_HEADS: k_cache.shape[2],
        shared.SCALE: float(scale),
        shared.SOFT_CAP: float(soft_cap or 0.0),
        own.KEY_BLOCKS: batch.key_blocks,
        own.NUM_COLUMNS: batch.num_columns,
        own.WINDOWS: batch.window,
        own.SINKS: batch.sinks,
        own.ROW_SEQUENCE: batch.row_sequence,
        own.SINK_Q: sink_q,
        own.STATISTICS: statistics,
    }
    for first, tensor in zip(
        (shared.K_BLOCK, shared.V_BLOCK, shared.KS_BLOCK, shared.VS_BLOCK), (k_cache, v_cache, *scales), strict=True
    ):  # strides of blocks, tokens and heads are three words
        if tensor is not None:
            words |= {first + axis: tensor.stride(axis) * tensor.element_size() for axis in range(3)}
    words |= {shared.K_SCALE: scales[0], shared.V_SCALE: scales[1]}
    for at, word in words.items():
        arguments[at] = word
    return arguments


def _num_slots(items: int, max_units: int, partial_bytes: int) -> int:
    """How many items share a decoding row."""
    wanted = -(-_ITEMS_PER_THREAD * pool().num_threads // max(1, items))
    slots = min(wanted, max_units - 2)
    return slots if items and slots > 1 and max_units * partial_bytes <= _MAX_PARTIAL_BYTES else 1
