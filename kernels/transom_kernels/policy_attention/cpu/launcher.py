"""Launches the CPU kernels of `policy_attention` and `add_block_mass`, which read the blocks of the KV cache in place.

The number of work items depends on shapes alone, and the kernels read a step's positions and lengths from tensors, so that decode
steps can be recorded as programs.

Legend: T query tokens, H query heads, D key width, Dv value width, B sequences, N table columns.
"""

from dataclasses import replace

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import launch
from transom_kernels.paged_attention.cpu.launcher import (
    attention_arguments,
    kind_of,
    launch_attention,
    scratch_bytes_of,
)
from transom_kernels.paged_attention.cpu.layout import UNIT_KEYS, WorkArguments
from transom_kernels.policy_attention.cpu.kernel import PolicyArguments
from transom_kernels.policy_attention.reference import PolicyBatch, PolicyInputs


def policy_attention_cpu(inputs: PolicyInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `q` [T, H, D] over compact block tables: softmax(scale q k^T) v.

    Keys of sink tokens are multiplied with `sink_q` if it is given; `statistics` [T, H, 2] receives each row's maximum and sum.
    """
    inputs, batch = _with_equal_strides(inputs), inputs.batch
    return launch_attention(
        "transom_kernels.policy_attention.cpu.kernel",
        inputs,
        batch.block_table.shape[1] * batch.block_size,
        _own(batch),
        sink_q=inputs.sink_q,
        statistics=inputs.statistics,
    )


def add_block_mass_cpu(mass: torch.Tensor, inputs: PolicyInputs) -> None:
    """Add to `mass` [B, N] the probabilities exp2(score - maximum) / sum of each block's keys, summed over all rows and heads."""
    inputs, batch = _with_equal_strides(inputs), inputs.batch
    kind = kind_of(inputs)
    units = -(-mass.shape[1] * batch.block_size // UNIT_KEYS)
    shared = attention_arguments(inputs, WorkArguments(), out=None, sink_q=inputs.sink_q, statistics=inputs.statistics)
    own = _own(batch)._replace(mass=mass, mass_units=units)
    kernel = cpu_kernel("transom_kernels.policy_attention.cpu.mass", "make_add_mass", **kind._asdict())
    launch(kernel, len(mass) * units, (shared, own), scratch_bytes=scratch_bytes_of(kind))


def _own(batch: PolicyBatch) -> PolicyArguments:
    return PolicyArguments(
        key_blocks=batch.key_blocks, num_columns=batch.num_columns, windows=batch.window, sinks=batch.sinks
    )


def _with_equal_strides(inputs: PolicyInputs) -> PolicyInputs:
    """Return the inputs; queries are copied if those for sink tokens have other strides."""
    if inputs.sink_q is None or inputs.sink_q.stride() == inputs.q.stride():
        return inputs
    return replace(inputs, q=inputs.q.contiguous(), sink_q=inputs.sink_q.contiguous())
