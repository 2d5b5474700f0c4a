"""The Triton implementation of `policy_attention` and `add_block_mass`.

One launch computes all sequences with one new token, another all others in tiles of several tokens. Tables under a policy are
short, so keys are not split among programs.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import INTERPRETED, next_power_of_two
from transom_kernels.policy_attention.batch import PolicyBatch
from transom_kernels.policy_attention.kernel import add_mass, attend_rows
from transom_kernels.policy_attention.tuning import TileConfig, tile_config
from transom_kernels.quantised_kv import head_width, is_packed, refuse_old_device


def policy_attention_triton(
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
    """The contract is that of `op.policy_attention`."""
    refuse_old_device(k_cache)
    num_rows, heads, width = q.shape
    kv_heads, value_width = v_cache.shape[2], head_width(v_cache)
    out = q.new_empty(num_rows, heads, value_width)
    sink_logits = None if sink_logits is None else sink_logits.float()
    unused = out
    for decodes in (True, False):
        config = tile_config(
            group=heads // kv_heads,
            widest=max(width, value_width),
            element_bytes=q.element_size(),
            cache_bytes=k_cache.element_size(),
            decodes=decodes,
        )
        tiles = _tiles(batch, config, decodes, q.device)
        if not len(tiles):
            continue
        attend_rows[(len(tiles), kv_heads)](
            q, q if sink_q is None else sink_q, k_cache, v_cache, out, unused if statistics is None else statistics,
            tiles, batch.block_table, batch.key_blocks, batch.num_columns, batch.window, batch.sinks, batch.start,
            batch.query_offset, unused if sink_logits is None else sink_logits,
            unused if k_scale is None else k_scale, unused if v_scale is None else v_scale,
            scale, soft_cap or 0.0, q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            *_scale_strides(k_scale), *_scale_strides(v_scale),
            batch.block_table.stride(0), kv_heads,
            BLOCK_SIZE=batch.block_size, GROUP=heads // kv_heads, D=width, E=value_width,
            HAS_SOFT_CAP=soft_cap is not None, HAS_SINK_LOGITS=sink_logits is not None,
            HAS_SINK_QUERY=sink_q is not None, HAS_SCALES=k_scale is not None, PACKED=is_packed(k_cache),
            WRITES_STATISTICS=statistics is not None, UPCAST=INTERPRETED,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_D=max(16, next_power_of_two(width)), BLOCK_E=max(16, next_power_of_two(value_width)),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def add_block_mass_triton(
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
    """The contract is that of `op.add_block_mass`."""
    refuse_old_device(k_cache)
    num_sequences, columns = mass.shape
    kv_heads, group, width = k_cache.shape[2], q.shape[1] // k_cache.shape[2], q.shape[2]
    config = tile_config(
        group=group,
        widest=width,
        element_bytes=q.element_size(),
        cache_bytes=k_cache.element_size(),
        decodes=True,
    )
    add_mass[(num_sequences, columns)](
        mass, q, q if sink_q is None else sink_q, k_cache, statistics, batch.block_table, batch.key_blocks,
        batch.num_columns, batch.window, batch.sinks, batch.start, batch.query_offset,
        statistics if k_scale is None else k_scale, scale, soft_cap or 0.0,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *_scale_strides(k_scale), batch.block_table.stride(0), kv_heads,
        BLOCK_SIZE=batch.block_size, GROUP=group, D=width,
        HAS_SOFT_CAP=soft_cap is not None, HAS_SINK_QUERY=sink_q is not None,
        HAS_SCALES=k_scale is not None, PACKED=is_packed(k_cache), UPCAST=INTERPRETED,
        BLOCK_M=config.block_m, BLOCK_N=max(16, next_power_of_two(batch.block_size)),
        BLOCK_D=max(16, next_power_of_two(width)), num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip


def _scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of blocks, tokens and heads."""
    return (0, 0, 0) if scales is None else scales.stride()


def _tiles(batch: PolicyBatch, config: TileConfig, decodes: bool, device: torch.device) -> torch.Tensor:
    """[W, 3] int32: sequence, first row and number of tokens of each tile, of decoding sequences or of all others."""
    key = ("tiles", decodes, config.tokens)
    if key not in batch.scratch:
        tiles, row = [], 0
        for b, count in enumerate(batch.count_host):
            if count and (count == 1) == decodes:
                tiles += [(b, row + at, min(config.tokens, count - at)) for at in range(0, count, config.tokens)]
            row += count
        batch.scratch[key] = torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True)
    found: torch.Tensor = batch.scratch[key]
    return found
