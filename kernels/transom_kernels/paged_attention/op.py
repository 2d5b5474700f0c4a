"""The operator `paged_attention`: attention of new queries over the paged KV cache of one KV cache group.

CPUs compute with compiled kernels (`cpu/`), CUDA devices with Triton (`triton/`). Where neither kernel is available, torch computes
(`reference.py`, the specification of both).

Legend: T query tokens, H query heads, KVH KV heads, Dv value width.
"""

import torch

from transom_kernels.cpu.recording import refuse_recording
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel, paged_attention_cpu
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference


def paged_attention(inputs: PagedInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `inputs.q` over the cached keys and values that `inputs.rule` lets each query see.

    The cache already holds the step's own keys and values: the caller runs `kv_write` first. Query head `h` reads KV head
    `h // (H / KVH)`. The query at position `p` sees key `k <= p` when `k < num_sink_tokens`, or when `k` is at least
    `batch.attend_from`, inside the last `window` tokens (the query counted) and in the same attention chunk of `chunk` tokens
    (`rule.py` has an example). A query that sees no key gets zeros. Cache slots that no query sees may hold any value, NaN
    included, and so may their scales.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        IndexError: the block table lacks the block of a visible key (checked only if the host has a copy of the table).
    """
    if uses_triton(inputs.q):
        out: torch.Tensor = implementation("paged_attention.triton.launcher", "paged_attention_triton")(inputs)
        return out
    inputs.check()
    if uses_cpu_kernels(inputs.q) and fits_cpu_kernel(inputs):
        return paged_attention_cpu(inputs)
    refuse_recording("attention in torch reads block tables in Python")
    return paged_attention_reference(inputs)
