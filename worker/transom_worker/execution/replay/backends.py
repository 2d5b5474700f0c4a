"""Chooses how steps are replayed: CUDA graphs, recorded programs of CPU kernels, or not at all.

`graph_bytes` estimates the memory that CUDA graphs need in addition to a step's peak, before the KV pool is sized.

Steps always run eagerly where a recording would be wrong or would gain nothing:

- `--enforce-eager`, and devices without kernels that can be recorded.
- Compressed attention layers (DeepSeek V4), on any device: the host takes part in choosing what a step reads.
- On GPUs with several ranks whose collectives go through the host (gloo), which a graph cannot record. nccl's can be captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from transom_core.config import EngineConfig, SchedulerConfig
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.model_config.architecture import Architecture
from transom_kernels.launch import multiprocessors_of, uses_cpu_kernels, uses_triton
from transom_kernels.paged_attention.triton.tuning import FEW_TOKENS, MAX_PARTIAL_BYTES
from transom_kernels.paged_attention.triton.work_items import filling_splits
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.memory import activation_bytes
from transom_worker.execution.replay.decode_replay import DecodeReplay
from transom_worker.execution.replay.decode_sizes import FEW_SEQS, DecodeSize, DecodeSizes
from transom_worker.execution.replay.graph_capture import capture_device
from transom_worker.execution.replay.graph_warm_up import capture_decode_graphs
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel

# What the driver needs for one graph: some hundred launches and their arguments. An estimate; it was never measured.
GRAPH_BYTES = 8 * 2**20
# cuBLAS's workspace on Hopper for the stream of captures; the measured peak of a step includes only its own stream's workspace.
WORKSPACE_BYTES = 32 * 2**20
FLOAT_BYTES = 4

_RECORDED_KINDS = (
    GroupKind.FULL, GroupKind.LATENT, GroupKind.WINDOW, GroupKind.CHUNK, GroupKind.SINKS_WINDOW, GroupKind.CONVOLUTION,
    GroupKind.STATE,
)  # fmt: skip


def decode_sizes(
    config: EngineConfig,
    parallel: Parallel,
    groups: Sequence[GroupSpec],
    *,
    max_model_len: int,
    device: torch.device,
    has_indexers: bool,
) -> DecodeSizes | None:
    """Return the sizes of steps to capture as CUDA graphs; None if no graphs are captured.

    With indexers there are none of mixed steps: graphs do not know which queries are a sequence's only ones, whose rows are split.
    """
    if not _may_record(config, groups) or not parallel.comm.can_capture or capture_device(device) is None:
        return None
    if not uses_triton(torch.empty(0, device=device)):
        return None
    scheduler = config.scheduler
    return DecodeSizes(
        groups,
        max_num_seqs=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        max_model_len=max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        has_mixed=not has_indexers,
    )


def make_replay(
    config: EngineConfig,
    model: Model,
    builder: BatchBuilder,
    slab: torch.Tensor,
    sizes: DecodeSizes | None,
    max_model_len: int,
    parallel: Parallel,
    on_size: Callable[[], None] = lambda: None,
) -> DecodeReplay | None:
    """Return the backend for a model's recorded steps; None if all run eagerly.

    `sizes`, from `decode_sizes`, are captured now, which takes up to two minutes; `on_size` is called before each. Programs are
    recorded as steps occur.
    """
    device = capture_device(slab.device)
    if sizes is not None and device is not None:
        return capture_decode_graphs(model, builder, sizes, device, slab=slab, parallel=parallel, on_size=on_size)
    if not _may_record(config, [group.spec for group in builder.layout.groups]) or not uses_cpu_kernels(slab):
        return None
    from transom_worker.execution.replay.decode_programs import DecodePrograms  # late: needs the compiler for CPUs

    return DecodePrograms(model, builder, max_num_seqs=config.scheduler.max_num_seqs, max_model_len=max_model_len)


def _may_record(config: EngineConfig, groups: Sequence[GroupSpec]) -> bool:
    return not config.model.enforce_eager and all(spec.kind in _RECORDED_KINDS for spec in groups)


def graph_bytes(
    sizes: DecodeSizes | None,
    architecture: Architecture,
    scheduler: SchedulerConfig,
    dtype_name: str,
    device: torch.device,
) -> int:
    """Return the bytes that all graphs need: one pool of activations, one tensor of logits and one input buffer that all share, and
    the graphs themselves.

    Mixed sizes are captured after the decode sizes. They need larger tensors, into which the pool's free ones may not fit, so both
    kinds are counted.
    """
    if sizes is None:
        return 0
    dtype: torch.dtype = getattr(torch, dtype_name)
    widest = _widest_partials(architecture, multiprocessors_of(device))
    pool = 0
    for kind in filter(None, (sizes.decodes, sizes.mixed)):
        most_tokens, most_seqs = max(size.num_tokens for size in kind), max(size.num_seqs for size in kind)
        largest = replace(scheduler, max_num_batched_tokens=most_tokens, max_num_seqs=most_seqs)
        partials = max(_partial_bytes(size, widest) for size in kind)
        pool += activation_bytes(architecture, largest, dtype) + partials
    logits = sizes.num_seqs[-1] * architecture.vocab_size * FLOAT_BYTES
    inputs = max(_table_bytes(size, sizes) for size in sizes.all)
    return pool + logits + inputs + WORKSPACE_BYTES + len(sizes.all) * GRAPH_BYTES


def _widest_partials(architecture: Architecture, multiprocessors: int) -> int:
    """Return the numbers of a token's partial results in the attention layer that has most: with as many splits as fill the device,
    each with a value, the largest score and the sum of weights for each query head."""
    return max(
        filling_splits(layer.num_kv_heads, multiprocessors)
        * layer.num_heads
        * ((layer.value_size or layer.head_size) + 2)
        for layer in architecture.layers
        if layer.recurrent is None
    )


def _partial_bytes(size: DecodeSize, widest: int) -> int:
    """Return the bytes of the partial results that the work items of one attention layer write before these are combined.

    A token has up to `widest` numbers. A decode size has one token for each sequence. In a mixed size, sequences with a few new
    tokens have partial results too, for up to `FEW_TOKENS` tokens each, and prompts as many as a launch may have.
    """
    if not size.mixed_tokens:
        return size.num_seqs * widest * FLOAT_BYTES
    return (size.num_seqs + FEW_SEQS * FEW_TOKENS) * widest * FLOAT_BYTES + MAX_PARTIAL_BYTES


def _table_bytes(size: DecodeSize, sizes: DecodeSizes) -> int:
    """Return the bytes of a size's block tables; its other inputs are negligible."""
    return sum(size.num_seqs * sizes.num_columns(size, group) * 4 for group in range(sizes.num_groups))
