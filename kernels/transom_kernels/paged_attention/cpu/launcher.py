"""Launches the CPU kernels of `paged_attention`, which read the blocks of the KV cache in place.

A step is planned once for all layers (`plan.py`): tiles of prompts, and sequences that decode. A decode step that is recorded as a
program has no tiles, and its batch has no lists on the host: launches depend on shapes alone, and kernels read positions and
lengths from tensors.

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, P block size in tokens.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import Arguments, CacheArguments
from transom_kernels.cpu.kernel import CpuKernel, cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.paged_attention.cpu.arguments import (
    AttentionArguments,
    PagedArguments,
    ResultArguments,
    WorkArguments,
)
from transom_kernels.paged_attention.cpu.layout import UNIT_KEYS, AttentionKind, decode_layout, prompt_layout
from transom_kernels.paged_attention.cpu.plan import num_slots_for, plan_of
from transom_kernels.paged_attention.inputs import AttentionInputs, PagedBatch, PagedInputs
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.quantised_kv import STORED


def fits_cpu_kernel(inputs: AttentionInputs) -> bool:
    """Return whether the kernels support these tensors: the elements of a query, of a key and of a value must be adjacent."""
    rows, sinks = (inputs.q, inputs.k_cache, inputs.v_cache), inputs.sink_logits
    return (
        all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in rows)
        and inputs.q.dtype in DTYPES
        and inputs.k_cache.dtype in STORED
        and (sinks is None or sinks.dtype in DTYPES)
    )


def paged_attention_cpu(inputs: PagedInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `q` [T, H, D]: softmax(scale q k^T) v over the cached keys that `rule` lets each query see.

    Caches are [ids, P, KVH, D] and [ids, P, KVH, Dv]; `batch` has block tables and positions.
    """
    batch, rule = inputs.batch, inputs.rule
    _check_blocks(batch, rule)
    most_keys = batch.block_table.shape[1] * batch.block_size
    if rule.window is not None:
        most_keys = min(most_keys, rule.window + rule.num_sink_tokens)
    own = PagedArguments(
        first_block=batch.first_block,
        attend_from=batch.attend_from,
        num_sink_blocks=batch.num_sink_blocks,
        window=rule.window or 0,
        num_sink_tokens=rule.num_sink_tokens,
        chunk=rule.chunk or 0,
    )
    return launch_attention("transom_kernels.paged_attention.cpu.kernel", inputs, most_keys, own)


def launch_attention(
    module: str,
    inputs: AttentionInputs,
    most_keys: int,
    own: Arguments,
    *,
    sink_q: torch.Tensor | None = None,
    statistics: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [T, H, Dv] by the kernels of `make_attend` and `make_combine` in `module`.

    The kernels get `own` arguments after the shared ones. A row sees at most `most_keys` keys. `sink_q` [T, H, D] and `statistics`
    [T, H, 2] are those of `policy_attention`.
    """
    q, batch, kv_heads = inputs.q, inputs.batch, inputs.kv_heads
    rows, heads, _ = q.shape
    out = empty((rows, heads, inputs.value_width), q.dtype)
    if out.numel() == 0:
        return out
    kind = kind_of(inputs)
    kernels = _kernels(module, kind)
    plan = plan_of(batch, kernels.tile_tokens)
    # 3 more: keys may begin and end inside a unit, and sink tokens have units of their own
    max_units = most_keys // UNIT_KEYS + 3
    unit_bytes = rows * kv_heads * kernels.partial_bytes
    num_slots = num_slots_for(plan.num_decoding * kv_heads, max_units, unit_bytes)
    work = WorkArguments(
        tiles=plan.tiles,
        num_tile_items=plan.num_tiles * kv_heads,
        decoding=plan.decoding,
        num_slots=num_slots,
        max_units=max_units,
        partials=empty((max_units * unit_bytes // 4,), torch.float32) if num_slots > 1 else None,
    )
    arguments = (attention_arguments(inputs, work, out=out, sink_q=sink_q, statistics=statistics), own)
    num_items = (plan.num_tiles + plan.num_decoding * num_slots) * kv_heads
    launch(kernels.attend, num_items, arguments, scratch_bytes=kernels.scratch_bytes)
    if num_slots > 1:
        launch(kernels.combine, plan.num_decoding * kv_heads, arguments)
    return out


def attention_arguments(
    inputs: AttentionInputs,
    work: WorkArguments,
    *,
    out: torch.Tensor | None,
    sink_q: torch.Tensor | None,
    statistics: torch.Tensor | None,
) -> AttentionArguments:
    """Return the argument words that all kernels of `paged_attention` and `policy_attention` get."""
    q, batch, sinks = inputs.q, inputs.batch, inputs.sink_logits
    return AttentionArguments(
        result=ResultArguments(
            out=out,
            kv_heads=inputs.kv_heads,
            scale=float(inputs.scale),
            soft_cap=float(inputs.soft_cap or 0.0),
            sink_logits=sinks,
            sink_stride=0 if sinks is None else sinks.stride(0) * sinks.element_size(),
            statistics=statistics,
        ),
        q=q,
        sink_q=sink_q,
        q_row=q.stride(0) * q.element_size(),
        q_head=q.stride(1) * q.element_size(),
        keys=CacheArguments.of(inputs.k_cache),
        values=CacheArguments.of(inputs.v_cache),
        key_scales=CacheArguments.of(inputs.k_scale),
        value_scales=CacheArguments.of(inputs.v_scale),
        block_table=batch.block_table,
        columns=batch.block_table.shape[1],
        block_size=batch.block_size,
        start=batch.start,
        query_offset=batch.query_offset,
        work=work,
    )


def kind_of(inputs: AttentionInputs) -> AttentionKind:
    """Return the kind of attention that a kernel for these tensors is compiled for."""
    return AttentionKind(
        dtype=DTYPES[inputs.q.dtype],
        stored=STORED[inputs.k_cache.dtype],
        group=inputs.group,
        width=inputs.q.shape[2],
        value_width=inputs.value_width,
        has_soft_cap=inputs.soft_cap is not None,
        sink_dtype=None if inputs.sink_logits is None else DTYPES[inputs.sink_logits.dtype],
    )


@cache
def scratch_bytes_of(kind: AttentionKind) -> int:
    """Return the bytes of scratch that a thread needs for a decoding row or a prompt's tile, whichever is more."""
    return int(max(decode_layout(kind).num_bytes, prompt_layout(kind).num_bytes))


class _Kernels(NamedTuple):
    """The kernels of one kind of attention, and their sizes."""

    attend: CpuKernel
    combine: CpuKernel
    tile_tokens: int  # query tokens of a prompt's tile
    partial_bytes: int  # of a unit's partial result of one KV head
    scratch_bytes: int  # of a thread


@cache
def _kernels(module: str, kind: AttentionKind) -> _Kernels:
    """Return the kernels. Fields that `combine` does not use are left out of its kind, so that many layers share it."""
    combined = kind._replace(stored=kind.dtype, width=1, has_soft_cap=False)
    attend = cpu_kernel(module, "make_attend", **kind._asdict())
    combine = cpu_kernel(module, "make_combine", **combined._asdict())
    return _Kernels(attend, combine, kind.tile_tokens, kind.partial_bytes, scratch_bytes_of(kind))


def _check_blocks(batch: PagedBatch, rule: MaskRule) -> None:
    """Check that block tables have the blocks of all visible keys, once per step and rule, if the host has the tables.

    Raises:
        IndexError: a block is missing.
    """
    key, size = ("blocks are there", rule), batch.block_size
    if key in batch.scratch or not batch.block_table_host:
        return
    for b, (start, count) in enumerate(zip(batch.start_host, batch.count_host, strict=True)):
        sinks_end, low = rule.key_ranges(start, start + count, batch.attend_from_host[b])
        for begin, end in ((0, sinks_end), (low, start + count)):
            if count and begin < end:
                batch.block_ids(b, begin // size, -(-end // size))
    batch.scratch[key] = True
