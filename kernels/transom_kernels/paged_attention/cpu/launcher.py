"""Launches the CPU kernels of `paged_attention`, which read the blocks of the KV cache in place.

A step is planned once for all layers: which sequences are computed in tiles, which row by row, and how many items share a row. A
decode step that is recorded as a program has no tiles, and its batch has no lists on the host: launches depend on shapes alone,
and kernels read positions and lengths from tensors.

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, P block size in tokens.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from transom_kernels.cpu.arguments import Arguments, CacheArguments
from transom_kernels.cpu.kernel import CpuKernel, cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.pool import pool
from transom_kernels.paged_attention.cpu.layout import (
    FEW_ROWS,
    UNIT_KEYS,
    AttentionArguments,
    AttentionKind,
    PagedArguments,
    ResultArguments,
    WorkArguments,
    decode_layout,
    is_short,
    prompt_layout,
)
from transom_kernels.paged_attention.inputs import AttentionBatch, AttentionInputs, PagedBatch, PagedInputs
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


# --- the plan of a step

# slots share decoding rows until there are this many items, so that threads end at about the same time
_ITEMS_PER_THREAD = 4
_MAX_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """The sequences that are computed in tiles, and those that are computed row by row."""

    tiles: torch.Tensor | None  # [num_tiles, 2] int32: sequence and first token
    num_tiles: int
    decoding: torch.Tensor | None  # [num_decoding] int32: numbers of the sequences computed by row; None: all
    num_decoding: int


def plan_of(batch: AttentionBatch, tile_tokens: int) -> Plan:
    """Return the step's plan. The first layer with tiles of this size makes it; the batch keeps it for the other layers."""
    key = ("attention on CPUs", tile_tokens)
    if key not in batch.scratch:
        batch.scratch[key] = _plan(batch, tile_tokens)
    plan: Plan = batch.scratch[key]
    return plan


def _plan(batch: AttentionBatch, tile_tokens: int) -> Plan:
    """Cut prompts into tiles. Tiles with the most keys come first, so that no thread starts a long one last."""
    prompts = [b for b, count in enumerate(batch.count_host) if count > FEW_ROWS]
    starts = batch.start.tolist() if prompts else []
    prompts = [b for b in prompts if not is_short(starts[b], batch.count_host[b])]
    num_sequences = batch.start.shape[0]
    if not prompts:
        return Plan(tiles=None, num_tiles=0, decoding=None, num_decoding=num_sequences)
    tiles = [(b, token) for b in prompts for token in range(0, batch.count_host[b], tile_tokens)]
    tiles.sort(key=lambda tile: -starts[tile[0]] - tile[1])
    decoding = np.setdiff1d(np.arange(num_sequences, dtype=np.int32), np.array(prompts, dtype=np.int32))
    return Plan(
        tiles=torch.tensor(tiles, dtype=torch.int32),
        num_tiles=len(tiles),
        decoding=torch.from_numpy(decoding),
        num_decoding=len(decoding),
    )


def num_slots_for(num_items: int, max_units: int, partial_bytes: int) -> int:
    """Return how many items share each decoding row and KV head, so that `num_items` of these keep all threads busy.

    At most `max_units - 2` units of a row's run are worth an item of their own. Rows are not shared if partial results, which take
    `partial_bytes` for one unit of all rows, would take more than _MAX_PARTIAL_BYTES.
    """
    if not num_items or max_units * partial_bytes > _MAX_PARTIAL_BYTES:
        return 1
    wanted = -(-_ITEMS_PER_THREAD * pool().num_threads // num_items)
    return max(1, min(wanted, max_units - 2))
