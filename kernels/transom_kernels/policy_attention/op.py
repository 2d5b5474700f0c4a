"""The operators `policy_attention`, attention of sequences with a KV policy, and `add_block_mass`, the attention that each block
receives. A *KV policy* drops blocks of a sequence from the cache; sequences without one use `paged_attention`.

CPUs compute with compiled kernels (`cpu/`), CUDA devices with Triton (`triton/`). Where neither kernel is available, torch computes
(`reference.py`, the specification of both).

Legend: T query tokens, B sequences, N table columns, H query heads, KVH KV heads, D key width, Dv value width.
"""

from dataclasses import replace

import torch

from transom_kernels.cpu.recording import current_recorder, refuse_recording
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.cpu.launcher import fits_cpu_kernel
from transom_kernels.policy_attention.cpu.launcher import add_block_mass_cpu, policy_attention_cpu
from transom_kernels.policy_attention.reference import (
    PolicyInputs,
    add_block_mass_reference,
    policy_attention_reference,
)


def policy_attention(inputs: PolicyInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `inputs.q` over the cached keys and values that `inputs.batch` lets each query see.

    The cache already holds the step's own keys and values. Query head `h` reads KV head `h // (H / KVH)`. If `sink_q` is given,
    keys below a sequence's `sinks` are multiplied with it instead of `q`. A query that sees no key gets zeros. Keys that no query
    sees may hold any value, NaN included.

    If `statistics` is given, it receives two numbers of each row, which `add_block_mass` reads: the maximum of its scores times
    log2(e), and the sum of its softmax weights exp(score - maximum), sink logit included.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
    """
    inputs.check()
    if uses_triton(inputs.q):
        out: torch.Tensor = implementation("policy_attention.triton.launcher", "policy_attention_triton")(inputs)
        return out
    if uses_cpu_kernels(inputs.q) and fits_cpu_kernel(inputs):
        return policy_attention_cpu(inputs)
    refuse_recording("attention in torch reads block tables in Python")
    return policy_attention_reference(inputs)


def empty_statistics(q: torch.Tensor) -> torch.Tensor:
    """Return memory for the statistics of queries [T, H, D]; while a CPU program is recorded, memory that the program owns."""
    recorder = current_recorder()
    shape = (*q.shape[:2], 2)
    return q.new_empty(shape, dtype=torch.float32) if recorder is None else recorder.empty(shape, torch.float32)


def add_block_mass(mass: torch.Tensor, inputs: PolicyInputs) -> None:
    """Add to `mass` [B, N] float32 the attention probability that each block of each table received.

    The probability of a block's keys is summed over all query rows and heads of the sequence. A sequence's mass therefore adds up
    to rows * heads, less what sink logits take. `inputs` are those of the call of `policy_attention` that has filled their
    `statistics`.

    Raises:
        ValueError: shapes or dtypes do not fit, or there are no statistics.
    """
    inputs.check()
    table = inputs.batch.block_table
    if mass.shape != table.shape or mass.dtype != torch.float32 or not mass.is_contiguous():
        raise ValueError(
            f"mass is {mass.dtype} {tuple(mass.shape)}; it must be contiguous float32 {tuple(table.shape)}."
        )
    if inputs.statistics is None:
        raise ValueError("There are no statistics; give those that policy_attention has filled.")
    # values are not read, and statistics already contain the sink logits
    inputs = replace(inputs, v_cache=inputs.k_cache, v_scale=inputs.k_scale, sink_logits=None)
    if uses_triton(inputs.q):
        implementation("policy_attention.triton.launcher", "add_block_mass_triton")(mass, inputs)
        return
    if uses_cpu_kernels(inputs.q) and fits_cpu_kernel(inputs):
        add_block_mass_cpu(mass, inputs)
        return
    refuse_recording("attention in torch reads block tables in Python")
    add_block_mass_reference(mass, inputs)
