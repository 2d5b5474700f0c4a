"""The operators `kv_write`, which writes a step's keys and values into their cache slots, and `prepare_qkv`, which applies norms
and RoPE first.

A *slot* is a token's place in the cache: block * P + offset. The *dump block* is a block that belongs to no sequence; masked tokens
are written there. CPUs compute with a compiled kernel (`cpu.py`), CUDA devices with Triton (`gpu.py`). Where neither kernel is
available, torch computes (`reference.py`, the specification of both).

Legend: T tokens, P block size in tokens, H query heads, KVH KV heads, D key width, Dv value width, R rotated width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.kv_write.inputs import PLAIN, Preparation, QkvInputs
from transom_kernels.kv_write.reference import prepare_qkv_reference
from transom_kernels.launch import uses_cpu_kernels, uses_triton


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write `k` [T, KVH, D] and `v` [T, KVH, Dv] in place to `k_cache` and `v_cache` [ids, P, KVH, width].

    Token `t` goes to block `slots[t] // P`, offset `slots[t] % P`; a token whose slot is below 0 is not written. The slots of
    masked tokens lie in the dump block and may repeat. Caches may have any strides.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    no_queries = k[:, :0]
    inputs = QkvInputs(q=no_queries, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    inputs.check(rounds=False)
    _prepare(inputs)


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
    """Norm, rotate and scale as `preparation` says; write keys and values; return the queries [T, H, D], contiguous.

    `q` [T, H, D], `k` [T, KVH, D] and `v` [T, KVH, Dv] are not changed; all steps compute in float32. `tables` are cosines and
    signed sines (see `rotary_`), [T, R] or [T, 1, R]. `query_scale` [T] multiplies queries. `slots` mean what they mean in
    `kv_write`. Without `v` and `v_cache` only keys are written, without `k` and `k_cache` nothing is written. Float32 keys and
    values may go into a cache of any dtype. A quantised cache (`quantised_kv.format`) receives quantised rows, and their scales go
    to `k_scale` and `v_scale` [ids, P, KVH].

    Raises:
        ValueError: shapes or dtypes do not fit, or the heads of a token are not adjacent.
    """
    inputs = QkvInputs(
        q=q,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slots=slots,
        tables=tables,
        preparation=preparation,
        query_scale=query_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if uses_triton(q):
        return _triton()(inputs)
    inputs.check(rounds=True)
    inputs.check_heads()
    return _prepare(inputs)


def _prepare(inputs: QkvInputs) -> torch.Tensor:
    """Write keys and values; return the queries. Implementations are imported late: not every machine has Triton or numba."""
    if inputs.heads_are_adjacent and uses_triton(inputs.q):
        return _triton()(inputs)
    if inputs.heads_are_adjacent and uses_cpu_kernels(inputs.q):
        from transom_kernels.kv_write.cpu import fits_cpu_kernel, prepare_qkv_cpu

        if fits_cpu_kernel(inputs):
            return prepare_qkv_cpu(inputs)
    refuse_recording("torch reads slots in Python")
    return prepare_qkv_reference(inputs)


@cache
def _triton() -> Callable[..., torch.Tensor]:
    """Return the implementation. It is imported once, here: an import statement would cost every call a microsecond."""
    from transom_kernels.kv_write.gpu import prepare_qkv_triton

    return prepare_qkv_triton
