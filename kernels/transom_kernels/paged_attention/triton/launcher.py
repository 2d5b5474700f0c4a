"""Launches the Triton kernels of `paged_attention`: planned once a step (`launches.py`), then one or two kernels for each layer.

Every launch runs the kernel `attend` over the work items of one tiling; where tiles were split, the kernel `combine` follows.

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, M rows of a tile.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import INTERPRETED, capability_of, next_power_of_two, split_width
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.triton.attend import attend
from transom_kernels.paged_attention.triton.combine import combine
from transom_kernels.paged_attention.triton.launches import AttentionLaunch, LaunchKey, launches_of
from transom_kernels.paged_attention.triton.tuning import COMBINED_AT_ONCE, KernelConfig, kernel_config
from transom_kernels.paged_attention.triton.work_items import Work
from transom_kernels.quantised_kv import is_packed, refuse_old_device


def paged_attention_triton(inputs: PagedInputs) -> torch.Tensor:
    """Attention [T, H, Dv] of `q` [T, H, D]: softmax(scale q k^T) v over the cached keys that `rule` lets each query see.

    Keys are [ids, P, KVH, D] and values [ids, P, KVH, Dv]; `op.paged_attention` has the whole contract.
    """
    q, k_cache = inputs.q, inputs.k_cache
    refuse_old_device(k_cache)
    out = q.new_empty(*q.shape[:2], inputs.value_width)
    key = LaunchKey(
        rule=inputs.rule,
        group=inputs.group,
        key_size=q.shape[2],
        element_bytes=q.element_size(),
        cache_bytes=k_cache.element_size(),
    )
    sinks = None if inputs.sink_logits is None else inputs.sink_logits.float()
    for launch in launches_of(inputs.batch, key, q.device):
        _attend(launch, inputs, sinks, out)
    return out


def _attend(launch: AttentionLaunch, inputs: PagedInputs, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
    """Run `attend` over the work items, and `combine` over the tiles that were split."""
    q, work, kv_heads, value_width = inputs.q, launch.work, inputs.kv_heads, inputs.value_width
    rows = launch.max_tile_tokens * inputs.group
    config = kernel_config(
        rows=rows,
        key_size=q.shape[2],
        value_size=value_width,
        element_bytes=q.element_size(),
        cache_bytes=inputs.k_cache.element_size(),
        capability=capability_of(q.device),
    )
    shape = (work.num_partials, kv_heads, config.block_m)
    partial_out = q.new_empty((*shape, value_width), dtype=torch.float32)
    partial_stats = q.new_empty((*shape, 2), dtype=torch.float32)
    _run_attend(work, inputs, sinks, config, out, partial_out, partial_stats)
    if len(work.combine_items):
        combine[(len(work.combine_items), rows, kv_heads)](
            partial_out, partial_stats, out, work.combine_items, partial_stats if sinks is None else sinks, kv_heads,
            GROUP=inputs.group, E=value_width, HAS_SINK_LOGITS=sinks is not None,
            BLOCK_M=config.block_m, BLOCK_E=next_power_of_two(value_width), BLOCK_S=COMBINED_AT_ONCE,
        )  # fmt: skip


def _run_attend(
    work: Work,
    inputs: PagedInputs,
    sinks: torch.Tensor | None,
    config: KernelConfig,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_stats: torch.Tensor,
) -> None:
    q, k_cache, v_cache, batch, rule = inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, inputs.rule
    unused, width, value_width = partial_stats, q.shape[2], inputs.value_width
    (d1, d2), (e1, e2) = split_width(width), split_width(value_width)
    k_scale, v_scale = inputs.k_scale, inputs.v_scale
    ks_strides, vs_strides = ((0, 0, 0) if scale is None else scale.stride() for scale in (k_scale, v_scale))
    attend[(len(work.items), inputs.kv_heads)](
        q, k_cache, v_cache, out, partial_out, partial_stats,
        work.items, batch.block_table, batch.first_block, batch.attend_from,
        unused if sinks is None else sinks, unused if k_scale is None else k_scale, unused if v_scale is None else v_scale,
        inputs.scale, inputs.soft_cap or 0.0,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], *ks_strides, *vs_strides,
        batch.block_table.stride(0), inputs.kv_heads, batch.num_sink_blocks,
        BLOCK_SIZE=batch.block_size, GROUP=inputs.group,
        D=width, D1=d1, D2=d2, E=value_width, E1=e1, E2=e2,
        WINDOW=rule.window or 0, SINKS=rule.num_sink_tokens, CHUNK=rule.chunk or 0,
        HAS_SOFT_CAP=inputs.soft_cap is not None, HAS_SINK_LOGITS=sinks is not None,
        HAS_SCALES=k_scale is not None, PACKED=is_packed(k_cache),
        UPCAST=INTERPRETED, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
