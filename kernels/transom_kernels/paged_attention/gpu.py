"""The Triton path of `paged_attention`: work is cut once a step, then a launch or two per layer.

Legend: T query tokens, H query heads, KVH heads, D key width, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.launch import INTERPRETED, next_power_of_two, split_width
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.join import join
from transom_kernels.paged_attention.kernel import attend
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.tuning import DECODE_TOKENS, decode_tiling, kernel_config, prompt_tiling
from transom_kernels.paged_attention.work import Work, plan_work


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactTable:
    """A table from which a policy has dropped blocks: `batch` counts what is in the table, this says where it stands."""

    key_blocks: torch.Tensor  # [B, columns] int32: each column's logical block
    position_shift: torch.Tensor  # [B] int32: the position of a sequence's first query less `batch.start`


@dataclass(slots=True, kw_only=True)
class ByProducts:
    """What a caller may want besides: filled where it is a tensor."""

    lse: torch.Tensor | None = None  # [T, H] float32, natural logarithm, sink included
    block_lse: torch.Tensor | None = None  # [B, KVH, columns, H / KVH] float32, base 2; -inf where nothing was read


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    rule: MaskRule,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sink_q: torch.Tensor | None = None,
    compact: CompactTable | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    by_products: ByProducts | None = None,
) -> torch.Tensor:
    """See `op.paged_attention`.

    `sink_q` (as `q`) are queries for sink tokens, rotated for where these stand. `kv_scales` ([KVH] float32 each) is what 8-bit
    keys and values are multiplied by.
    """
    wanted = by_products or ByProducts()
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])
    group = q.shape[1] // k_cache.shape[2]
    for part in _parts(batch, rule, group, q):
        _attend(
            part,
            q,
            k_cache,
            v_cache,
            batch,
            scale,
            rule,
            soft_cap,
            sink_logits,
            sink_q,
            compact,
            kv_scales,
            out,
            wanted,
        )
    return out


@dataclass(frozen=True, slots=True)
class _Part:
    """Decoding sequences, or prompts."""

    work: Work
    most_tokens: int  # of a tile


def _parts(batch: PagedBatch, rule: MaskRule, group: int, q: torch.Tensor) -> list[_Part]:
    """The batch's work under this rule, cut by the first layer that asks."""
    held: dict[tuple[MaskRule, int, int, int], list[_Part]] = batch.scratch.setdefault("paged_attention_gpu", {})
    key = (rule, group, q.shape[2], q.element_size())
    if key not in held:
        few = [count for count in batch.count_host if count <= DECODE_TOKENS]
        tilings = [(decode_tiling(), max(few, default=0))]
        if len(few) < len(batch.count_host):
            prompt = prompt_tiling(group=group, key_size=q.shape[2], element_bytes=q.element_size())
            tilings.append((prompt, prompt.tile_tokens))
        held[key] = [_Part(plan_work(batch, rule, tiling, q.device), most) for tiling, most in tilings if most]
    return held[key]


def _attend(
    part: _Part,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    rule: MaskRule,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None,
    sink_q: torch.Tensor | None,
    compact: CompactTable | None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    wanted: ByProducts,
) -> None:
    heads, kv_heads, key_size, value_size = q.shape[1], k_cache.shape[2], q.shape[2], v_cache.shape[3]
    work, group = part.work, heads // kv_heads
    config = kernel_config(
        rows=part.most_tokens * group,
        key_size=key_size,
        value_size=value_size,
        block_size=batch.block_size,
        element_bytes=q.element_size(),
    )
    partial_out = q.new_empty((work.num_partials, kv_heads, config.block_m, value_size), dtype=torch.float32)
    partial_stats = q.new_empty((work.num_partials, kv_heads, config.block_m, 2), dtype=torch.float32)
    unused = partial_stats
    (d1, d2), (e1, e2) = split_width(key_size), split_width(value_size)
    has_sinks, has_scales = sink_logits is not None, kv_scales is not None
    sinks = sink_logits.float() if sink_logits is not None else unused
    scales = kv_scales or (unused, unused)
    attend[(len(work.items), kv_heads)](
        q, sink_q if sink_q is not None else q, k_cache, v_cache, out,
        wanted.lse if wanted.lse is not None else unused,
        partial_out, partial_stats,
        wanted.block_lse if wanted.block_lse is not None else unused,
        work.items, batch.block_table, batch.first_block, batch.attend_from,
        *((compact.key_blocks, compact.position_shift) if compact is not None else (batch.block_table, batch.start)),
        sinks, *scales,
        scale, soft_cap or 0.0,
        q.stride(0), q.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        batch.block_table.stride(0), batch.block_table.shape[1], kv_heads, batch.num_pinned_blocks,
        BLOCK_SIZE=batch.block_size, GROUP=group,
        D=key_size, D1=d1, D2=d2, E=value_size, E1=e1, E2=e2,
        WINDOW=rule.window or 0, SINKS=rule.num_sink_tokens, CHUNK=rule.chunk or 0,
        HAS_SOFT_CAP=soft_cap is not None, HAS_SINK_LOGITS=has_sinks, HAS_KEY_BLOCKS=compact is not None,
        HAS_SINK_QUERY=sink_q is not None,
        HAS_SCALES=has_scales, WRITES_LSE=wanted.lse is not None, WRITES_BLOCK_LSE=wanted.block_lse is not None,
        UPCAST=INTERPRETED, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if len(work.joins):
        join[(len(work.joins), part.most_tokens * group, kv_heads)](
            partial_out, partial_stats, out, wanted.lse if wanted.lse is not None else unused, work.joins, sinks, kv_heads,
            GROUP=group, E=value_size, HAS_SINK_LOGITS=has_sinks, WRITES_LSE=wanted.lse is not None,
            BLOCK_M=config.block_m, BLOCK_E=next_power_of_two(value_size),
        )  # fmt: skip
