"""The operators `kv_write` (scatter a step's keys and values into their cache slots) and `prepare_qkv` (norms and RoPE before
that).

A *slot* is a token's place in the cache: block * P + offset. The *dump block* is a block that belongs to no sequence; masked tokens
are written there.

Legend: T tokens, P block size in tokens, H query heads, KVH KV heads, D key width, Dv value width, R rotated width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.kv_write.fused import fused_target
from transom_kernels.kv_write.prepare import PLAIN, Preparation, prepare_qkv_reference
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.quantised_kv import FORMATS, check_cache, head_width, quantise_rows

# "k" or "v", rows, their cache, and its scales if it is quantised
_Written = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scratch: dict[str, Any] | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write `k` [T, KVH, D] and `v` [T, KVH, Dv] in place to `k_cache` and `v_cache` [ids, P, KVH, width].

    Rows for quantised caches are quantised, and their scales are written to `k_scale` and `v_scale` [ids, P, KVH]
    (`quantised_kv.format`).

    Token `t` goes to block `slots[t] // P`, offset `slots[t] % P`. Masked tokens have slots of the dump block, which may repeat.
    Caches may have any strides. `scratch` keeps indices for further calls with these slots (other layers of the step).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check([("k", k, k_cache, k_scale), ("v", v, v_cache, v_scale)], slots)
    kv_scales = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    if uses_triton(k) and heads_are_adjacent(k) and heads_are_adjacent(v):
        from transom_kernels.kv_write.gpu import kv_write_triton

        kv_write_triton(k, v, k_cache, v_cache, slots, kv_scales)
        return
    if uses_cpu_kernels(k) and heads_are_adjacent(k) and heads_are_adjacent(v):
        from transom_kernels.kv_write.cpu import kv_write_cpu, prepare_qkv_fits

        if prepare_qkv_fits(k, k, v, k_cache, v_cache, slots):
            kv_write_cpu(k, v, k_cache, v_cache, slots, kv_scales)
            return
    if k_scale is not None and v_scale is not None:
        refuse_recording("torch quantises keys and values")
        _write_quantised(k, k_cache, k_scale, slots)
        _write_quantised(v, v_cache, v_scale, slots)
        return
    scratch = {} if scratch is None else scratch
    fused = fused_target(k, v, k_cache, v_cache, slots, scratch)
    if fused is not None:
        rows, index, source = fused
        rows.index_put_((index,), source)
        return
    blocks, offsets = _block_offsets(slots, k_cache.shape[1], scratch)
    k_cache.index_put_((blocks, offsets), k)
    v_cache.index_put_((blocks, offsets), v)


def prepare_qkv(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    preparation: Preparation = PLAIN,
    query_scale: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm, rotate and scale as `preparation` says, in float32; write keys and values, return the queries [T, H, D], contiguous.

    `q` [T, H, D], `k` [T, KVH, D] and `v` [T, KVH, Dv] are not changed. `tables` are cosines and signed sines (see `rotary_`), [T,
    R] or [T, 1, R]. `query_scale` [T] multiplies queries. `slots` are those of `kv_write`; a token whose slot is below 0 is not
    written. Without `v` and `v_cache` only keys are written, without `k` and `k_cache` nothing is. Float32 keys and values may go
    into a cache of any dtype. Rows for quantised caches are quantised; their scales go to `k_scale` and `v_scale` [ids, P, KVH].

    Raises:
        ValueError: shapes or dtypes do not fit, or the heads of a token are not adjacent.
    """
    if (v is None) != (v_cache is None) or (k is None) != (k_cache is None) or (k is None and v is not None):
        raise ValueError("k and k_cache belong together, and v and v_cache: give both or neither, and no v without k.")
    written = [
        (name, rows, cache, scale)
        for name, rows, cache, scale in (("k", k, k_cache, k_scale), ("v", v, v_cache, v_scale))
        if rows is not None and cache is not None
    ]
    _check(written, slots, rounds=True)
    if (k is not None and q.shape[::2] != k.shape[::2]) or not all(
        map(heads_are_adjacent, (q, *(rows for _, rows, _, _ in written)))
    ):
        parts = [(tuple(rows.shape), rows.stride()) for rows in (q, k, v) if rows is not None]
        raise ValueError(
            f"q, k and v have shapes and strides {parts}: give equally wide heads that follow each other in memory."
        )
    kv_scales = None if k_scale is None else (k_scale, v_scale)
    if uses_triton(q):
        from transom_kernels.kv_write.gpu import prepare_qkv_triton

        return prepare_qkv_triton(q, k, v, k_cache, v_cache, slots, tables, preparation, query_scale, kv_scales)
    if uses_cpu_kernels(q):
        from transom_kernels.kv_write.cpu import prepare_qkv_cpu, prepare_qkv_fits

        if prepare_qkv_fits(q, k, v, k_cache, v_cache, slots, tables, preparation, query_scale):
            return prepare_qkv_cpu(q, k, v, k_cache, v_cache, slots, tables, preparation, query_scale, kv_scales)
    refuse_recording("torch reads slots in Python")
    flat = None if tables is None else (tables[0].flatten(0, -2), tables[1].flatten(0, -2))
    return prepare_qkv_reference(q, k, v, k_cache, v_cache, slots, flat, preparation, query_scale, kv_scales)


def heads_are_adjacent(x: torch.Tensor) -> bool:
    """Whether the heads of each token of `x` [T, H, D] are adjacent and contiguous."""
    return x.stride(2) == 1 and (x.shape[1] < 2 or x.stride(1) == x.shape[2])


def _block_offsets(slots: torch.Tensor, block_size: int, scratch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The block and the offset of each slot, computed once per step."""
    if "kv_write.split" not in scratch:
        scratch["kv_write.split"] = (slots // block_size, slots % block_size)
    pair: tuple[torch.Tensor, torch.Tensor] = scratch["kv_write.split"]
    return pair


def _write_quantised(rows: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise rows [T, KVH, width] and scatter them and their scales."""
    place = (slots // cache.shape[1], slots % cache.shape[1])
    elements, scales = quantise_rows(rows, FORMATS[cache.dtype])
    cache.view(torch.uint8).index_put_(place, elements.view(torch.uint8))  # torch scatters no 8-bit floats
    scale.index_put_(place, scales)


def _check(written: Sequence[_Written], slots: torch.Tensor, *, rounds: bool = False) -> None:
    """Raise ValueError unless keys fit their cache and scales, and values theirs.

    `rounds` allows float32 rows for a cache of fewer bits.
    """
    for name, rows, cache, scale in written:
        width = head_width(cache)
        if rows.shape[1:] != (*cache.shape[2:3], width):
            raise ValueError(
                f"{name} {tuple(rows.shape)} does not fit {name}_cache {tuple(cache.shape)} of heads of {width} numbers: heads and "
                "widths must agree."
            )
        rounded = rounds and scale is None and rows.dtype == torch.float32 and cache.dtype not in FORMATS
        check_cache(name, cache.dtype if rounded else rows.dtype, cache, scale)
        if len(rows) != len(slots):
            raise ValueError(f"{name} has {len(rows)} tokens, but there are {len(slots)} slots: give one per token.")
    dtypes = [cache.dtype for _, _, cache, _ in written]
    if len(set(dtypes)) > 1:
        raise ValueError(f"The caches are {dtypes}; keys and values need one dtype.")
