"""Estimates the memory that CUDA graphs need in addition to a step's peak, before the KV pool is sized."""

from __future__ import annotations

from dataclasses import replace

import torch

from transom_core.config import SchedulerConfig
from transom_core.model_config.architecture import Architecture
from transom_kernels.launch import next_power_of_two
from transom_kernels.paged_attention.triton.tuning import MIN_DOT_ROWS
from transom_worker.execution.memory import activation_bytes
from transom_worker.execution.replay.decode_sizes import DecodeSize, DecodeSizes

# What the driver needs for one graph: some hundred launches and their arguments. An estimate; it was never measured.
GRAPH_BYTES = 8 * 2**20
# cuBLAS's workspace on Hopper for the stream of captures; the measured peak of a step includes only its own stream's workspace.
WORKSPACE_BYTES = 32 * 2**20
FLOAT_BYTES = 4


def graph_bytes(
    sizes: DecodeSizes | None, architecture: Architecture, scheduler: SchedulerConfig, dtype_name: str
) -> int:
    """Return the bytes that all graphs need: one pool of activations, one tensor of logits and one input buffer that all share, and
    the graphs themselves.
    """
    if sizes is None:
        return 0
    dtype: torch.dtype = getattr(torch, dtype_name)
    most_seqs = sizes.num_seqs[-1]
    decoding = replace(scheduler, max_num_batched_tokens=most_seqs, max_num_seqs=most_seqs)
    pool = activation_bytes(architecture, decoding, dtype) + max(
        _partial_bytes(size, sizes, architecture) for size in sizes.all
    )
    logits = most_seqs * architecture.vocab_size * FLOAT_BYTES
    inputs = max(_table_bytes(size, sizes) for size in sizes.all)
    return pool + logits + inputs + WORKSPACE_BYTES + len(sizes.all) * GRAPH_BYTES


def _partial_bytes(size: DecodeSize, sizes: DecodeSizes, architecture: Architecture) -> int:
    """Return the bytes of the partial results that the work items of one attention layer write before these are combined.

    For each query row, a partial result holds the values and two more numbers: the largest score and the sum of weights.
    """
    if size.level == 0:
        return 0
    widest = 0
    for layer in architecture.layers:
        rows = max(MIN_DOT_ROWS, next_power_of_two(layer.num_heads // layer.num_kv_heads))
        widest = max(widest, layer.num_kv_heads * rows * ((layer.value_size or layer.head_size) + 2))
    return sizes.num_items(size) * widest * FLOAT_BYTES


def _table_bytes(size: DecodeSize, sizes: DecodeSizes) -> int:
    """Return the bytes of a size's block tables; its other inputs are negligible."""
    return sum(size.num_seqs * sizes.num_columns(size, group) * 4 for group in range(sizes.num_groups))
