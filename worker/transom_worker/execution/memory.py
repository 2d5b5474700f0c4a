"""How large the KV pool may be, and where a worker's memory went."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from transom_worker.config import DEFAULT_CPU_KV_SHARE, CacheConfig, SchedulerConfig
from transom_worker.errors import ConfigError
from transom_worker.kvcache.layout import GroupLayout
from transom_worker.model_config.architecture import Architecture

MEMINFO = Path("/proc/meminfo")
STATM = Path("/proc/self/statm")


class ControlGroup(NamedTuple):
    """Where a version of control groups keeps a process's memory limit and use, and the statistic of cache that it gives back."""

    folder: Path
    limit: str
    use: str
    cache: str


CGROUPS = (
    ControlGroup(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    ControlGroup(
        Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
)


def pool_bytes(
    cache: CacheConfig,
    *,
    device: torch.device,
    max_useful_bytes: int,
    profile: Callable[[], None],
    graph_bytes: int = 0,
    ranks_on_host: int = 1,
) -> int:
    """Bytes for a rank's KV pool: as set, else what the device has room for, at most what could ever be used.

    On CUDA `profile` runs one worst-case step, whose peak is left free, and so is what graphs will hold. On CPUs all ranks of a
    host share its memory.

    Raises:
        ConfigError: nothing is left.
    """
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if device.type == "cuda":
        room = _cuda_room(cache.gpu_memory_utilization, device, profile, graph_bytes)
    else:
        room = int(available_cpu_bytes() * DEFAULT_CPU_KV_SHARE) // ranks_on_host
    return min(room, max_useful_bytes)


def max_useful_bytes(groups: Sequence[GroupLayout], scheduler: SchedulerConfig, max_model_len: int) -> int:
    """Bytes of the longest possible sequences in every place, all groups at full length, and a page's worth of slack."""
    blocks = [-(-max_model_len // group.spec.block_size) + 1 for group in groups]
    sequence = sum(count * group.stride_bytes for count, group in zip(blocks, groups, strict=True))
    slack = 8 * len(groups) * max(group.stride_bytes for group in groups)
    return scheduler.max_num_seqs * sequence + slack


def activation_bytes(architecture: Architecture, scheduler: SchedulerConfig, dtype: torch.dtype) -> int:
    """An estimate of what one worst-case step needs beside weights and KV: a layer's widest tensors, and the logits."""
    layer = architecture.layers[0]
    attention = (2 * layer.num_heads + 2 * layer.num_kv_heads) * layer.head_size
    per_token = (4 * architecture.hidden_size + attention + _feed_forward_width(architecture)) * dtype.itemsize
    logits = scheduler.max_num_seqs * architecture.vocab_size * 4
    return scheduler.max_num_batched_tokens * per_token + 2 * logits


def _feed_forward_width(architecture: Architecture) -> int:
    """Elements per token; of experts for each one chosen, what goes in and what comes out besides."""
    mixture = architecture.mixture
    if mixture is None:
        return 3 * architecture.intermediate_size
    return 3 * max(mixture.dense_size, mixture.num_chosen * (mixture.inner_size + architecture.hidden_size))


def process_memory_bytes(device: torch.device) -> int:
    """What this process holds: reserved by PyTorch on a GPU, else resident in memory; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def available_cpu_bytes() -> int:
    """Memory that this process could still take: the machine's, or what its control group leaves."""
    available = _meminfo_available()
    for group in CGROUPS:
        try:
            limit, use = (group.folder / group.limit).read_text().strip(), int((group.folder / group.use).read_text())
        except OSError:
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - use + _reclaimable_bytes(group)))
    return available


def _reclaimable_bytes(group: ControlGroup) -> int:
    """File cache that counts as use, such as weights that were just read, and goes as soon as memory is wanted."""
    try:
        lines = (group.folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{group.cache} ")), 0)


def _meminfo_available() -> int:
    lines = MEMINFO.read_text().splitlines() if MEMINFO.exists() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{MEMINFO} does not say how much memory is available; give --kv-cache-memory-bytes.")


def _cuda_room(utilization: float, device: torch.device, profile: Callable[[], None], graph_bytes: int) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    room = int(total * utilization) - others - peak - graph_bytes
    if room <= 0:
        raise ConfigError(
            f"--gpu-memory-utilization {utilization} of {total} bytes leaves nothing for the KV pool: weights and "
            f"activations peak at {peak}, others hold {others}, CUDA graphs will take {graph_bytes}; raise it, lower "
            "--max-num-batched-tokens or give --enforce-eager."
        )
    return room
