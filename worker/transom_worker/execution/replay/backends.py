"""Chooses how decode steps are replayed: CUDA graphs, recorded programs of CPU kernels, or not at all.

Decode steps always run eagerly where a recording would be wrong or would gain nothing:

- `--enforce-eager`, and devices without kernels that can be recorded.
- Latent and compressed attention layers (DeepSeek V4), on any device: the host takes part in choosing what a step reads.
- On GPUs with several ranks: gloo's collectives go through the host, which a graph cannot record, and with nccl each rank would
  have to capture, and give up, the same sizes as the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_core.config import EngineConfig
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_kernels.launch import uses_cpu_kernels, uses_triton
from transom_worker.execution.batch.batch import BatchBuilder
from transom_worker.execution.replay.decode_replay import DecodeReplay
from transom_worker.execution.replay.decode_sizes import DecodeSizes
from transom_worker.execution.replay.graph_capture import capture_device
from transom_worker.execution.replay.graph_warm_up import capture_decode_graphs
from transom_worker.models.model import Model
from transom_worker.models.parallel import Parallel

_RECORDED_KINDS = (GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNK, GroupKind.SINKS_WINDOW)


def decode_sizes(
    config: EngineConfig, parallel: Parallel, groups: Sequence[GroupSpec], *, max_model_len: int, device: torch.device
) -> DecodeSizes | None:
    """Return the sizes of decode steps to capture as CUDA graphs; None if no graphs are captured."""
    if not _may_record(config, groups) or parallel.size > 1 or capture_device(device) is None:
        return None
    if not uses_triton(torch.empty(0, device=device)):
        return None
    scheduler = config.scheduler
    return DecodeSizes(
        groups,
        max_num_seqs=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens),
        max_model_len=max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def make_replay(
    config: EngineConfig,
    model: Model,
    builder: BatchBuilder,
    slab: torch.Tensor,
    sizes: DecodeSizes | None,
    max_model_len: int,
) -> DecodeReplay | None:
    """Return the backend for a model's decode steps; None if they run eagerly.

    `sizes`, from `decode_sizes`, are captured now, which takes up to two minutes. Programs are recorded as steps occur.
    """
    device = capture_device(slab.device)
    if sizes is not None and device is not None:
        return capture_decode_graphs(model, builder, sizes, device, slab=slab)
    if not _may_record(config, [group.spec for group in builder.layout.groups]) or not uses_cpu_kernels(slab):
        return None
    from transom_worker.execution.replay.decode_programs import DecodePrograms  # late: needs the compiler for CPUs

    return DecodePrograms(model, builder, max_num_seqs=config.scheduler.max_num_seqs, max_model_len=max_model_len)


def _may_record(config: EngineConfig, groups: Sequence[GroupSpec]) -> bool:
    return not config.model.enforce_eager and all(spec.kind in _RECORDED_KINDS for spec in groups)
