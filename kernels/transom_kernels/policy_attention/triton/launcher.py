"""Launches the Triton kernels of `policy_attention` and `add_block_mass`, and chooses their tile sizes.

One launch computes all sequences with one new token, another one all other sequences, in tiles of several tokens. Tables under a
policy are short, so keys are not split among programs. Decoding is memory-bound and takes tiles of 16 rows, the least for a product
on tensor cores; prompts take 64. These kernels compute only the sequences of a step that have a policy. Speed matters less here, so
decoding and prompts have one configuration each, chosen to fit registers and shared memory.

Legend: T query tokens, H query heads, KVH KV heads, D key width, Dv value width, B sequences, N table columns, W tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.launch import INTERPRETED, MAX_REGISTERS, next_power_of_two
from transom_kernels.policy_attention.reference import PolicyBatch, PolicyInputs
from transom_kernels.policy_attention.triton.kernel import add_mass, attend_rows
from transom_kernels.quantised_kv import is_packed, refuse_old_device


def policy_attention_triton(inputs: PolicyInputs) -> torch.Tensor:
    """Return attention [T, H, Dv] of `q` [T, H, D] over compact block tables: softmax(scale q k^T) v.

    Keys of sink tokens are multiplied with `sink_q` if it is given; `statistics` [T, H, 2] receives each row's maximum and sum.
    """
    refuse_old_device(inputs.k_cache)
    q, k_cache, v_cache, batch = inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch
    out = unused = q.new_empty(*q.shape[:2], inputs.value_width)
    sinks = None if inputs.sink_logits is None else inputs.sink_logits.float()
    k_scale, v_scale, statistics = inputs.k_scale, inputs.v_scale, inputs.statistics
    for decodes in (True, False):
        config = _config(inputs, decodes)
        tiles = _tiles(batch, config, decodes, q.device)
        if not len(tiles):
            continue
        attend_rows[(len(tiles), inputs.kv_heads)](
            q, q if inputs.sink_q is None else inputs.sink_q, k_cache, v_cache, out,
            unused if statistics is None else statistics,
            tiles, batch.block_table, batch.key_blocks, batch.num_columns, batch.window, batch.sinks, batch.start,
            batch.query_offset, unused if sinks is None else sinks,
            unused if k_scale is None else k_scale, unused if v_scale is None else v_scale,
            inputs.scale, inputs.soft_cap or 0.0, q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            *_scale_strides(k_scale), *_scale_strides(v_scale), batch.block_table.stride(0), inputs.kv_heads,
            BLOCK_SIZE=batch.block_size, GROUP=inputs.group, D=q.shape[2], E=inputs.value_width,
            HAS_SOFT_CAP=inputs.soft_cap is not None, HAS_SINK_LOGITS=sinks is not None,
            HAS_SINK_QUERY=inputs.sink_q is not None, HAS_SCALES=k_scale is not None, PACKED=is_packed(k_cache),
            WRITES_STATISTICS=statistics is not None, UPCAST=INTERPRETED,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            BLOCK_D=max(16, next_power_of_two(q.shape[2])), BLOCK_E=max(16, next_power_of_two(inputs.value_width)),
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return out


def add_block_mass_triton(mass: torch.Tensor, inputs: PolicyInputs) -> None:
    """Add to `mass` [B, N] the probabilities exp2(score - maximum) / sum of each block's keys, summed over all rows and heads."""
    refuse_old_device(inputs.k_cache)
    q, k_cache, batch, k_scale = inputs.q, inputs.k_cache, inputs.batch, inputs.k_scale
    config = _config(inputs, decodes=True)
    # `mass` stands in for absent scales, which the kernel does not read
    add_mass[tuple(mass.shape)](
        mass, q, q if inputs.sink_q is None else inputs.sink_q, k_cache, inputs.statistics, batch.block_table,
        batch.key_blocks, batch.num_columns, batch.window, batch.sinks, batch.start, batch.query_offset,
        mass if k_scale is None else k_scale, inputs.scale, inputs.soft_cap or 0.0,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *_scale_strides(k_scale), batch.block_table.stride(0),
        inputs.kv_heads,
        BLOCK_SIZE=batch.block_size, GROUP=inputs.group, D=q.shape[2],
        HAS_SOFT_CAP=inputs.soft_cap is not None, HAS_SINK_QUERY=inputs.sink_q is not None,
        HAS_SCALES=k_scale is not None, PACKED=is_packed(k_cache), UPCAST=INTERPRETED,
        BLOCK_M=config.block_m, BLOCK_N=max(16, next_power_of_two(batch.block_size)),
        BLOCK_D=max(16, next_power_of_two(q.shape[2])), num_warps=config.num_warps, num_stages=1,
        maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def _config(inputs: PolicyInputs, decodes: bool) -> TileConfig:
    return tile_config(
        group=inputs.group,
        widest=max(inputs.q.shape[2], inputs.value_width),
        element_bytes=inputs.q.element_size(),
        cache_bytes=inputs.k_cache.element_size(),
        decodes=decodes,
    )


def _scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides of blocks, tokens and heads; zeros if there are no scales."""
    return (0, 0, 0) if scales is None else scales.stride()


def _tiles(batch: PolicyBatch, config: TileConfig, decodes: bool, device: torch.device) -> torch.Tensor:
    """Return the tiles of decoding sequences or of all others, [W, 3] int32: sequence, first row and number of tokens."""
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


MIN_DOT_ROWS = 16
PROMPT_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """The constants for which kernels are compiled: tokens and rows of a tile, keys of an iteration, warps, pipeline stages."""

    tokens: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_config(*, group: int, widest: int, element_bytes: int, cache_bytes: int, decodes: bool) -> TileConfig:
    """Return the configuration for `group` query heads per KV head with at most `widest` numbers each.

    An element of queries has `element_bytes` bytes, one of the cache `cache_bytes`.
    """
    wanted = group if decodes else max(group, PROMPT_ROWS if element_bytes <= 2 and widest <= 128 else MIN_DOT_ROWS)
    block_m = max(MIN_DOT_ROWS, next_power_of_two(wanted))
    is_widened = cache_bytes < element_bytes  # rows of quantised caches take registers twice, as stored and widened
    block_n = 16 if element_bytes > 2 else 64 if widest <= (64 if is_widened else 128) else 32
    is_large = widest * element_bytes > 512 or ((widest > 64 or is_widened) and block_m > MIN_DOT_ROWS)
    return TileConfig(
        tokens=1 if decodes else block_m // group,
        block_m=block_m,
        block_n=block_n,
        num_warps=8 if is_large else 4,  # 4 warps lack registers for large tiles on sm_80 and sm_100
        num_stages=1 if element_bytes > 2 else 2,
    )
