"""`kv_write`: scatter the keys and values of T tokens into their slots. `prepare_qkv`: the same, and all that comes before.

Legend: T tokens, P block size, H query heads, KVH heads, D key width, Dv value width, R rotated width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from transom_kernels.kv_write.fused import fused_target
from transom_kernels.kv_write.prepare import PLAIN, Preparation, prepare_qkv_reference
from transom_kernels.launch import uses_triton


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    scratch: dict[str, Any] | None = None,
) -> None:
    """Write `k` [T, KVH, D] and `v` [T, KVH, Dv] to `k_cache` and `v_cache` [ids, P, KVH, width], in place.

    Token `t` goes to block `slots[t] // P`, offset `slots[t] % P`; masked tokens carry slots of the dump block, which may
    repeat. Caches may have any strides. `scratch` keeps indices for further calls with the same slots (other layers).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check([(k, k_cache), (v, v_cache)], slots)
    if uses_triton(k) and heads_lie_together(k) and heads_lie_together(v):
        from transom_kernels.kv_write.gpu import kv_write_triton

        kv_write_triton(k, v, k_cache, v_cache, slots)
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
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    how: Preparation = PLAIN,
    query_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise, rotate and scale as `how` says, in float32; write keys and values, return queries [T, H, D] in one piece.

    `q` [T, H, D], `k` [T, KVH, D] and `v` [T, KVH, Dv] are left as they are; `tables` are cosines and signed sines [T, R] or
    [T, 1, R] (see `rotary_`); `query_scale` [T] multiplies queries. Slots are those of `kv_write`. Without `v` and `v_cache` keys
    alone are written; keys in float32 go into a cache of any dtype.

    Raises:
        ValueError: shapes or dtypes do not fit, or the heads of a token do not lie together.
    """
    if (v is None) != (v_cache is None):
        raise ValueError("v and v_cache belong together: give both or neither.")
    parts = [(k, k_cache)] if v is None or v_cache is None else [(k, k_cache), (v, v_cache)]
    _check(parts, slots, rounds=True)
    if q.shape[::2] != k.shape[::2] or not all(map(heads_lie_together, (q, *(rows for rows, _ in parts)))):
        raise ValueError(
            f"q {tuple(q.shape)} {q.stride()}, k {tuple(k.shape)} {k.stride()} and v {None if v is None else v.stride()}: give "
            "equally wide heads that follow each other in memory."
        )
    if uses_triton(q):
        from transom_kernels.kv_write.gpu import prepare_qkv_triton

        return prepare_qkv_triton(q, k, v, k_cache, v_cache, slots, tables, how, query_scale)
    flat = None if tables is None else (tables[0].flatten(0, -2), tables[1].flatten(0, -2))
    return prepare_qkv_reference(q, k, v, k_cache, v_cache, slots, flat, how, query_scale)


def heads_lie_together(x: torch.Tensor) -> bool:
    """Whether each token's heads [T, H, D] are one run of elements."""
    return x.stride(2) == 1 and (x.shape[1] < 2 or x.stride(1) == x.shape[2])


def _block_offsets(slots: torch.Tensor, block_size: int, scratch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if "kv_write.split" not in scratch:
        scratch["kv_write.split"] = (slots // block_size, slots % block_size)
    pair: tuple[torch.Tensor, torch.Tensor] = scratch["kv_write.split"]
    return pair


def _check(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor, *, rounds: bool = False) -> None:
    """Keys and their cache, then values; `rounds`: float32 may go where there are fewer bits."""
    if any(rows.shape[1:] != cache.shape[2:] for rows, cache in parts):
        (rows, caches) = ([tuple(tensor.shape) for tensor in side] for side in zip(*parts, strict=True))
        raise ValueError(f"k and v {rows} do not fit caches {caches}: heads and widths must agree.")
    if any(rows.dtype != cache.dtype and not (rounds and rows.dtype == torch.float32) for rows, cache in parts):
        (rows, caches) = ([tensor.dtype for tensor in side] for side in zip(*parts, strict=True))
        raise ValueError(f"k and v are {rows}, their caches {caches}.")
    if any(len(rows) != len(slots) for rows, _ in parts):
        raise ValueError(
            f"{[len(rows) for rows, _ in parts]} keys and values, {len(slots)} slots: give one each per token."
        )
