"""The operators `kv_write`, which writes a step's keys and values into their cache slots, and `prepare_qkv`, which applies norms
and RoPE first.

A *slot* is a token's place in the cache: block * P + offset. The *dump block* is a block that belongs to no sequence; masked tokens
are written there. CPUs compute with a compiled kernel (`cpu.py`), CUDA devices with Triton (`gpu.py`). Where neither kernel is
available, torch computes (`reference.py`, the specification of both).

Legend: T tokens, P block size in tokens, H query heads, KVH KV heads, D key width, Dv value width, R rotated width.
"""

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.kv_write.cpu import fits_cpu_kernel, prepare_qkv_cpu
from transom_kernels.kv_write.reference import QkvInputs, prepare_qkv_reference
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
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
    if inputs.heads_are_adjacent and uses_triton(k):
        prepare_qkv(inputs)
    else:
        _prepare(inputs)


def prepare_qkv(inputs: QkvInputs) -> torch.Tensor:
    """Norm, rotate and scale as `inputs.preparation` says; write keys and values; return the queries [T, H, D], contiguous.

    All steps compute in float32 and leave `q`, `k` and `v` unchanged. `slots` mean what they mean in `kv_write`. Float32 keys and
    values may go into a cache of any dtype. A quantised cache (`quantised_kv.format`) receives quantised rows, and their scales
    go to `k_scale` and `v_scale`.

    Raises:
        ValueError: shapes or dtypes do not fit, or the heads of a token are not adjacent.
    """
    if uses_triton(inputs.q):
        out: torch.Tensor = implementation("kv_write.gpu", "prepare_qkv_triton")(inputs)
        return out
    inputs.check(rounds=True)
    inputs.check_heads()
    return _prepare(inputs)


def _prepare(inputs: QkvInputs) -> torch.Tensor:
    """Write keys and values; return the queries: by a CPU kernel, or in torch."""
    if inputs.heads_are_adjacent and uses_cpu_kernels(inputs.q) and fits_cpu_kernel(inputs):
        return prepare_qkv_cpu(inputs)
    refuse_recording("torch reads slots in Python")
    return prepare_qkv_reference(inputs)
