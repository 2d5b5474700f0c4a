"""Decides how large a rank's KV pool may be, and reports how much memory a process uses."""

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from transom_core.config import DEFAULT_CPU_KV_SHARE, CacheConfig, SchedulerConfig
from transom_core.errors import ConfigError
from transom_core.kv_cache.layout import GroupLayout
from transom_core.machine.host_memory import available_host_bytes
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.layer_attention import LayerAttention

STATM = Path("/proc/self/statm")


def pool_bytes(
    cache: CacheConfig,
    *,
    device: torch.device,
    max_useful_bytes: int,
    run_worst_case: Callable[[], None],
    graph_bytes: int = 0,
    made_bytes: int = 0,
    ranks_on_host: int = 1,
) -> int:
    """Return the bytes of a rank's KV pool: the configured number, else what the device has free, up to `max_useful_bytes`.

    On CUDA, `run_worst_case` runs the step that needs the most memory, with a pool of `made_bytes`; the pool leaves room for that
    step's peak besides, and for `graph_bytes` of CUDA graphs. On CPUs, the `ranks_on_host` ranks of a host share its memory
    equally.

    Raises:
        ConfigError: no memory is left for a pool.
    """
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if device.type == "cuda":
        free_bytes = _cuda_free_bytes(cache, device, run_worst_case, graph_bytes, made_bytes)
    else:
        free_bytes = int(available_host_bytes() * DEFAULT_CPU_KV_SHARE) // ranks_on_host
    return min(free_bytes, max_useful_bytes)


def max_useful_bytes(groups: Sequence[GroupLayout], scheduler: SchedulerConfig, max_model_len: int) -> int:
    """Return the bytes that `max_num_seqs` sequences of `max_model_len` tokens take in all groups, plus some pages of slack.

    A larger pool would hold no more running sequences.
    """
    blocks = [-(-max_model_len // group.spec.block_size) + 1 for group in groups]
    sequence = sum(count * group.stride_bytes for count, group in zip(blocks, groups, strict=True))
    slack = 8 * len(groups) * max(group.stride_bytes for group in groups)
    return scheduler.max_num_seqs * sequence + slack


def activation_bytes(architecture: Architecture, scheduler: SchedulerConfig, dtype: torch.dtype) -> int:
    """Estimate the bytes that the largest step needs besides weights and KV pool: one layer's widest tensors, and the logits, in
    float32 and twice, because sampling works on a copy.

    A layer's tensors are, per token, four of the hidden size, and what its attention or recurrence and its feed-forward layer hold.
    """
    mixer = max(_mixer_width(layer) for layer in architecture.layers)
    per_token = (4 * architecture.hidden_size + mixer + _feed_forward_width(architecture)) * dtype.itemsize
    logits = scheduler.max_num_seqs * architecture.vocab_size * 4
    return scheduler.max_num_batched_tokens * per_token + 2 * logits


def _mixer_width(layer: LayerAttention) -> int:
    """Return the elements that a layer's attention holds per token: queries and output, keys and values. A recurrence holds two
    tensors of queries and keys, before and after the convolution, and five of values: these two, gates, output and gated output."""
    keys = layer.num_kv_heads * layer.head_size
    if layer.recurrent is not None:
        return 4 * keys + 5 * layer.num_heads * (layer.value_size or layer.head_size)
    return 2 * layer.num_heads * layer.head_size + 2 * keys


def _feed_forward_width(architecture: Architecture) -> int:
    """Return the elements that a feed-forward layer holds per token: gate, up and their product. Experts also hold each chosen
    expert's input and output."""
    mixture = architecture.mixture
    if mixture is None:
        return 3 * architecture.intermediate_size
    return 3 * max(mixture.dense_size, mixture.num_chosen * (mixture.inner_size + architecture.hidden_size))


def process_memory_bytes(device: torch.device) -> int:
    """Return this process's memory in bytes: what torch has reserved on a GPU, else resident memory; 0 if the system does not
    report it."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _cuda_free_bytes(
    cache: CacheConfig, device: torch.device, run_worst_case: Callable[[], None], graph_bytes: int, made_bytes: int
) -> int:
    """Return the bytes of the device that this process may use, minus its peak in a step and the bytes of CUDA graphs.

    All processes together may use the share `gpu_memory_utilization` of the device, so what others hold is not this one's. Workers
    that share a GPU each take their `gpu_share` of it at most, since the others may not have allocated their memory yet.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_case()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - made_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    usable = int(total * cache.gpu_memory_utilization)
    free_bytes = min(usable - others, int(usable * cache.gpu_share)) - peak - graph_bytes
    if free_bytes <= 0:
        share = "" if cache.gpu_share == 1 else f", of which this worker has the share {cache.gpu_share:g},"
        raise ConfigError(
            f"--gpu-memory-utilization {cache.gpu_memory_utilization} of {total} bytes{share} leaves nothing for the KV "
            f"pool: weights and activations peak at {peak}, other processes hold {others}, CUDA graphs will take {graph_bytes}; "
            "raise it, lower --max-num-batched-tokens or give --enforce-eager."
        )
    return free_bytes
