"""The operators `policy_attention` and `add_block_mass`: attention of rows with a KV policy, and its mass by cache block.

CPUs compute with compiled kernels (`cpu.py`), CUDA devices with Triton (`gpu.py`); `reference.py` is the specification of both.
Rows without a policy have an operator of their own, `paged_attention`.

Legend: T query tokens, B sequences, N table columns, H query heads, KVH KV heads, D key width, Dv value width, P block size in
tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from transom_kernels.cpu.recording import current_recorder, refuse_recording
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.policy_attention.batch import PolicyBatch
from transom_kernels.policy_attention.reference import add_block_mass_reference, policy_attention_reference
from transom_kernels.quantised_kv import check_kv, head_width

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def policy_attention(
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
    """Attention [T, H, Dv] of `q` [T, H, D] over `k_cache` [ids, P, KVH, D] and `v_cache` [ids, P, KVH, Dv].

    The cache already holds the step's own keys and values. Which keys a query sees is said in `batch`. Query head `h` reads KV
    head `h // (H / KVH)`. A score is `q k * scale`, then `soft_cap * tanh(score / soft_cap)`. Keys below a sequence's `sinks` are
    multiplied with `sink_q` [T, H, D], where it is given, in place of `q`. `sink_logits` [H] add to the softmax's denominator
    alone. A query that sees no key gets zeros. Keys that no query sees may hold any value, NaN included. Caches may have any
    strides. Quantised caches (`quantised_kv.format`) come with their scales, `k_scale` and `v_scale` [ids, P, KVH] float32.

    `statistics` [T, H, 2] float32, if given, receives of each row the maximum of its scores (times log2 e) and the sum of its
    softmax weights, relative to that maximum, sink logit included: `add_block_mass` reads them.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
    """
    _check(q, k_cache, v_cache, batch, (k_scale, v_scale))
    for name, value, shape in (
        ("sink_q", sink_q, q.shape),
        ("statistics", statistics, (*q.shape[:2], 2)),
        ("sink_logits", sink_logits, q.shape[1:2]),
    ):
        if value is not None and tuple(value.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {tuple(shape)}.")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be above 0, or None.")
    options: dict[str, Any] = {
        "scale": scale,
        "soft_cap": soft_cap,
        "sink_logits": sink_logits,
        "sink_q": sink_q,
        "statistics": statistics,
    }
    if uses_triton(q):
        from transom_kernels.policy_attention.gpu import policy_attention_triton

        return policy_attention_triton(q, k_cache, v_cache, batch, **options, k_scale=k_scale, v_scale=v_scale)
    if uses_cpu_kernels(q):
        from transom_kernels.policy_attention.cpu import fits_cpu_kernel, policy_attention_cpu

        if fits_cpu_kernel(q, k_cache, v_cache, sink_logits):
            return policy_attention_cpu(q, k_cache, v_cache, batch, **options, k_scale=k_scale, v_scale=v_scale)
    refuse_recording("attention in torch reads block tables in Python")
    return policy_attention_reference(q, k_cache, v_cache, batch, **options, k_scale=k_scale, v_scale=v_scale)


def empty_statistics(q: torch.Tensor) -> torch.Tensor:
    """Memory for the statistics of queries [T, H, D]; of the program's memory while one is recorded."""
    recorder = current_recorder()
    shape = (*q.shape[:2], 2)
    return q.new_empty(shape, dtype=torch.float32) if recorder is None else recorder.empty(shape, torch.float32)


def add_block_mass(
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
    """Add to `mass` [B, N] float32, for each block of each table, the attention probability of its keys.

    The sum goes over all query rows and heads of the sequence; a sequence's mass adds up to (rows * heads), less what sink logits
    take. The other arguments are those of the call of `policy_attention` that has filled `statistics`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(q, k_cache, k_cache, batch, (k_scale, k_scale))
    if mass.shape != batch.block_table.shape or mass.dtype != torch.float32 or not mass.is_contiguous():
        raise ValueError(
            f"mass is {mass.dtype} {tuple(mass.shape)}; it must be contiguous float32 {tuple(batch.block_table.shape)}."
        )
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sink_q": sink_q}
    if uses_triton(q):
        from transom_kernels.policy_attention.gpu import add_block_mass_triton

        add_block_mass_triton(mass, q, k_cache, batch, statistics, **options, k_scale=k_scale)
        return
    if uses_cpu_kernels(q):
        from transom_kernels.policy_attention.cpu import add_block_mass_cpu, fits_cpu_kernel

        if fits_cpu_kernel(q, k_cache, k_cache, None):
            add_block_mass_cpu(mass, q, k_cache, batch, statistics, **options, k_scale=k_scale)
            return
    refuse_recording("attention in torch reads block tables in Python")
    add_block_mass_reference(mass, q, k_cache, batch, statistics, **options, k_scale=k_scale)


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PolicyBatch,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    if q.dtype not in _DTYPES:
        raise ValueError(f"q is {q.dtype}; it must be one of {', '.join(map(str, _DTYPES))}.")
    check_kv(q.dtype, (k_cache, v_cache), scales)
    heads, kv_heads, width = q.shape[1], k_cache.shape[2], head_width(k_cache)
    if k_cache.shape[:3] != v_cache.shape[:3] or q.shape[2] != width or heads % kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)} does not fit caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} of keys of {width} numbers: "
            "widths must agree and query heads be a multiple of KV heads."
        )
    if k_cache.shape[1] != batch.block_size:
        raise ValueError(f"cache blocks have {k_cache.shape[1]} tokens; the batch says {batch.block_size}.")
    if batch.row_sequence.shape[0] != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows; the batch has {batch.row_sequence.shape[0]}.")
