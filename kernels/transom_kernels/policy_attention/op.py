"""The operators `policy_attention`, attention of rows with a KV policy, and `add_block_mass`, the attention of each block.

CPUs compute with compiled kernels (`cpu/`), CUDA devices with Triton (`triton/`). Where neither kernel is available, torch computes
(`reference.py`, the specification of both). Rows without a policy use `paged_attention`.

Legend: T query tokens, B sequences, N table columns, H query heads, KVH KV heads, D key width, Dv value width, P block size in
tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.recording import current_recorder, refuse_recording
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_kernels.policy_attention.batch import PolicyBatch
from transom_kernels.policy_attention.inputs import PolicyInputs
from transom_kernels.policy_attention.reference import add_block_mass_reference, policy_attention_reference


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
    """Return attention [T, H, Dv] of `q` [T, H, D] over `k_cache` [ids, P, KVH, D] and `v_cache` [ids, P, KVH, Dv].

    The cache already holds the step's own keys and values. `PolicyBatch` says which keys a query sees. Query head `h` reads KV
    head `h // (H / KVH)`. A score is `(q . k) * scale`; with `soft_cap` it becomes `soft_cap * tanh(score / soft_cap)`. If
    `sink_q` [T, H, D] is given, keys below a sequence's `sinks` are multiplied with it instead of `q`. `sink_logits` [H] add to
    the softmax's denominator only. A query that sees no key gets zeros. Keys that no query sees may hold any value, NaN included.
    Caches may have any strides. Quantised caches (`quantised_kv.format`) come with `k_scale` and `v_scale` [ids, P, KVH] float32.

    If `statistics` [T, H, 2] float32 is given, it receives two numbers of each row, which `add_block_mass` reads: the maximum of
    its scores times log2(e), and the sum of its softmax weights exp(score - maximum), sink logit included.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
    """
    inputs = PolicyInputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        batch=batch,
        scale=scale,
        soft_cap=soft_cap,
        sink_logits=sink_logits,
        k_scale=k_scale,
        v_scale=v_scale,
        sink_q=sink_q,
        statistics=statistics,
    )
    inputs.check()
    # implementations are imported late, since not every machine has Triton or numba
    if uses_triton(q):
        from transom_kernels.policy_attention.triton.launcher import policy_attention_triton

        return policy_attention_triton(inputs)
    if uses_cpu_kernels(q):
        from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel
        from transom_kernels.policy_attention.cpu.launcher import policy_attention_cpu

        if fits_cpu_kernel(inputs):
            return policy_attention_cpu(inputs)
    refuse_recording("attention in torch reads block tables in Python")
    return policy_attention_reference(inputs)


def empty_statistics(q: torch.Tensor) -> torch.Tensor:
    """Return memory for the statistics of queries [T, H, D]; while a CPU program is recorded, memory that the program owns."""
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
    """Add to `mass` [B, N] float32 the attention probability that each block of each table received.

    The probability of a block's keys is summed over all query rows and heads of the sequence. A sequence's mass therefore adds up
    to rows * heads, less what sink logits take. The other arguments are those of the call of `policy_attention` that has filled
    `statistics`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    inputs = PolicyInputs(
        q=q,
        k_cache=k_cache,
        v_cache=k_cache,  # values are not read
        batch=batch,
        scale=scale,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=k_scale,
        sink_q=sink_q,
        statistics=statistics,
    )
    inputs.check()
    if mass.shape != batch.block_table.shape or mass.dtype != torch.float32 or not mass.is_contiguous():
        raise ValueError(
            f"mass is {mass.dtype} {tuple(mass.shape)}; it must be contiguous float32 {tuple(batch.block_table.shape)}."
        )
    if uses_triton(q):
        from transom_kernels.policy_attention.triton.launcher import add_block_mass_triton

        add_block_mass_triton(mass, inputs)
        return
    if uses_cpu_kernels(q):
        from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel
        from transom_kernels.policy_attention.cpu.launcher import add_block_mass_cpu

        if fits_cpu_kernel(inputs):
            add_block_mass_cpu(mass, inputs)
            return
    refuse_recording("attention in torch reads block tables in Python")
    add_block_mass_reference(mass, inputs)
