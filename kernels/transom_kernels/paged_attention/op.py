"""The operator `paged_attention`: attention of new queries over the paged KV cache of one KV cache group.

CPUs compute with compiled kernels (`cpu/`), CUDA devices with Triton (`triton/`). Where neither kernel is available, torch computes
(`reference.py`, the specification of both).

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, P block size in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.paged_attention.rule import MaskRule


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
    """Return attention [T, H, Dv] of `q` [T, H, D] over `k_cache` [ids, P, KVH, D] and `v_cache` [ids, P, KVH, Dv].

    Caches have the dtype of `q`, or are quantised (`quantised_kv.format`; int4 halves the last axis) and come with `k_scale` and
    `v_scale` [ids, P, KVH] float32, which may have any strides.

    The cache already holds the step's own keys and values: the caller runs `kv_write` first. Query head `h` reads KV head
    `h // (H / KVH)`. The query at position `p` sees key `k <= p` when `k < num_sink_tokens`, or when `k` is at least
    `batch.attend_from`, inside the last `window` tokens (the query counted) and in the same attention chunk of `chunk` tokens
    (`rule.py` has an example). A score is `(q . k) * scale`; with `soft_cap` it becomes `soft_cap * tanh(score / soft_cap)`.
    `sink_logits` [H] add to the softmax's denominator only. A query that sees no key gets zeros. Cache slots that no query sees
    may hold any value, NaN included, and so may their scales. Caches may have any strides.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        IndexError: the block table lacks the block of a visible key (checked only if the host has a copy of the table).
    """
    inputs = PagedInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        scale=scale,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
        k_scale=k_scale,
        v_scale=v_scale,
        batch=batch,
        rule=_rule(window, num_sink_tokens, chunk),
    )
    # implementations are imported late, since not every machine has Triton or numba
    if uses_triton(q):
        return _triton()(inputs)
    inputs.check()
    if uses_cpu_kernels(q):
        from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel, paged_attention_cpu

        if fits_cpu_kernel(inputs):
            return paged_attention_cpu(inputs)
    refuse_recording("attention in torch reads block tables in Python")
    return paged_attention_reference(inputs)


@cache
def _rule(window: int | None, num_sink_tokens: int, chunk: int | None) -> MaskRule:
    return MaskRule(window=window, num_sink_tokens=num_sink_tokens, chunk=chunk)


@cache
def _triton() -> Callable[..., torch.Tensor]:
    """Return the implementation. It is imported once, here: an import statement would cost every call a microsecond."""
    from transom_kernels.paged_attention.triton.launcher import paged_attention_triton

    return paged_attention_triton
