"""The operator `paged_attention`: attention of new queries over the paged KV cache of one KV cache group.

CPUs compute with compiled kernels (`cpu.py`) or torch (`torch_tiles.py`), CUDA devices with Triton (`gpu.py`); `reference.py` is
the specification of all.

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, P block size in tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.torch_tiles import paged_attention_torch
from transom_kernels.quantised_kv import check_kv, head_width

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    num_sink_tokens: int = 0,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [T, H, Dv] of `q` [T, H, D] over `k_cache` [ids, P, KVH, D] and `v_cache` [ids, P, KVH, Dv], all of one dtype.

    Quantised caches (`quantised_kv.format`; of int4 the last axis is halved) come with their scales, `k_scale` and `v_scale` [ids,
    P, KVH] float32 with any strides.

    The cache already holds the step's own keys and values: the caller runs `kv_write` first. Query head `h` reads KV head
    `h // (H / KVH)`. The query at position `p` sees key `k <= p` when `k < num_sink_tokens`, or when `k` is at least
    `batch.attend_from`, inside the last `window` tokens (the query counted) and in the same attention chunk of `chunk` tokens
    (`rule.py` has an example). A score is `q k * scale`, then `soft_cap * tanh(score / soft_cap)`. `sink_logits` [H] add to the
    softmax's denominator alone. A query that sees no key gets zeros. Cache slots that no query sees may hold any value, NaN
    included, and so may their scales. Caches may have any strides.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        IndexError: the block table lacks the block of a visible key (found on the CPU only).
    """
    _check(q, k_cache, v_cache, batch, (k_scale, v_scale))
    _check_options(window, num_sink_tokens, chunk, soft_cap, sink_logits, q.shape[1])
    rule = MaskRule(window=window, num_sink_tokens=num_sink_tokens, chunk=chunk)
    kv_scales = None if k_scale is None or v_scale is None else (k_scale, v_scale)
    attend = _implementation(q, k_cache, v_cache, sink_logits)
    return attend(
        q,
        k_cache,
        v_cache,
        batch,
        scale=scale,
        rule=rule,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
        kv_scales=kv_scales,
    )


def _implementation(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sink_logits: torch.Tensor | None,
) -> Callable[..., torch.Tensor]:
    """The implementation for these tensors; imported here, since neither Triton nor numba is installed everywhere."""
    if uses_triton(q):
        from transom_kernels.paged_attention.gpu import paged_attention_triton

        return paged_attention_triton
    if uses_cpu_kernels(q):
        from transom_kernels.paged_attention.cpu import fits_cpu_kernel, paged_attention_cpu

        if fits_cpu_kernel(q, k_cache, v_cache, sink_logits):
            return paged_attention_cpu
    refuse_recording("attention in torch reads block tables in Python")
    return paged_attention_torch


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
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


def _check_options(
    window: int | None,
    num_sink_tokens: int,
    chunk: int | None,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None,
    num_heads: int,
) -> None:
    for name, value in (("window", window), ("chunk", chunk), ("soft_cap", soft_cap)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0, or None.")
    if num_sink_tokens < 0:
        raise ValueError(f"num_sink_tokens is {num_sink_tokens}; it must be 0 or more.")
    if sink_logits is not None and sink_logits.shape != (num_heads,):
        raise ValueError(f"sink_logits has shape {tuple(sink_logits.shape)}; give one per query head: ({num_heads},).")
