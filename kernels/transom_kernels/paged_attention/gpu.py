"""The Triton path of `paged_attention`: work is cut once a step, then a launch or two per layer.

Legend: T query tokens, H query heads, KVH heads, D key width, E value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.launch import INTERPRETED, next_power_of_two, split_width
from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.combine import combine
from transom_kernels.paged_attention.kernel import attend
from transom_kernels.paged_attention.launches import AttentionLaunch, LaunchKey, launches_of
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.tuning import COMBINED_AT_ONCE, KernelConfig, kernel_config, stages_on
from transom_kernels.paged_attention.work import Work


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
    call = _Call(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        batch=batch,
        out=q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3]),
        scale=scale,
        rule=rule,
        soft_cap=soft_cap,
        sink_logits=None if sink_logits is None else sink_logits.float(),
        sink_q=sink_q,
        compact=compact,
        kv_scales=kv_scales,
        by_products=by_products or ByProducts(),
    )
    asked = LaunchKey(
        rule=rule,
        group=call.group,
        key_size=q.shape[2],
        element_bytes=q.element_size(),
        cache_bytes=k_cache.element_size(),
    )
    for part in launches_of(batch, asked, q.device):
        _attend(part, call)
    return call.out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What one layer asks for."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PagedBatch
    out: torch.Tensor
    scale: float
    rule: MaskRule
    soft_cap: float | None
    sink_logits: torch.Tensor | None  # float32
    sink_q: torch.Tensor | None
    compact: CompactTable | None
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None
    by_products: ByProducts

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k_cache.shape[2]


def _attend(part: AttentionLaunch, call: _Call) -> None:
    """One launch over the tiles, and one that combine_items those that were cut."""
    kv_heads, value_size = call.k_cache.shape[2], call.v_cache.shape[3]
    rows = part.max_tile_tokens * call.group
    config = kernel_config(
        rows=rows,
        key_size=call.q.shape[2],
        value_size=value_size,
        block_size=1 if call.by_products.block_lse is None else call.batch.block_size,
        element_bytes=call.q.element_size(),
    )
    shape = (part.work.num_partials, kv_heads, config.block_m)
    partial_out = call.q.new_empty((*shape, value_size), dtype=torch.float32)
    partial_stats = call.q.new_empty((*shape, 2), dtype=torch.float32)
    _launch(part.work, call, config, partial_out, partial_stats)
    if len(part.work.combine_items):
        sinks, lse = call.sink_logits, call.by_products.lse
        combine[(len(part.work.combine_items), rows, kv_heads)](
            partial_out, partial_stats, call.out, partial_stats if lse is None else lse, part.work.combine_items,
            partial_stats if sinks is None else sinks, kv_heads,
            GROUP=call.group, E=value_size, HAS_SINK_LOGITS=sinks is not None, WRITES_LSE=lse is not None,
            BLOCK_M=config.block_m, BLOCK_E=next_power_of_two(value_size), BLOCK_S=COMBINED_AT_ONCE,
        )  # fmt: skip


def _launch(
    work: Work, call: _Call, config: KernelConfig, partial_out: torch.Tensor, partial_stats: torch.Tensor
) -> None:
    q, batch, rule, compact, wanted = call.q, call.batch, call.rule, call.compact, call.by_products
    kv_heads, unused = call.k_cache.shape[2], partial_stats
    (d1, d2), (e1, e2) = split_width(q.shape[2]), split_width(call.v_cache.shape[3])
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else (0, 0)
    attend[(len(work.items), kv_heads)](
        q, q if call.sink_q is None else call.sink_q, call.k_cache, call.v_cache, call.out,
        unused if wanted.lse is None else wanted.lse,
        partial_out, partial_stats,
        unused if wanted.block_lse is None else wanted.block_lse,
        work.items, batch.block_table, batch.first_block, batch.attend_from,
        *((batch.block_table, batch.start) if compact is None else (compact.key_blocks, compact.position_shift)),
        unused if call.sink_logits is None else call.sink_logits, *(call.kv_scales or (unused, unused)),
        call.scale, call.soft_cap or 0.0,
        q.stride(0), q.stride(1),
        *call.k_cache.stride()[:3], *call.v_cache.stride()[:3],
        batch.block_table.stride(0), batch.block_table.shape[1], kv_heads, batch.num_sink_blocks,
        BLOCK_SIZE=batch.block_size, GROUP=call.group,
        D=q.shape[2], D1=d1, D2=d2, E=call.v_cache.shape[3], E1=e1, E2=e2,
        WINDOW=rule.window or 0, SINKS=rule.num_sink_tokens, CHUNK=rule.chunk or 0,
        HAS_SOFT_CAP=call.soft_cap is not None, HAS_SINK_LOGITS=call.sink_logits is not None,
        HAS_KEY_BLOCKS=compact is not None, HAS_SINK_QUERY=call.sink_q is not None,
        HAS_SCALES=call.kv_scales is not None,
        WRITES_LSE=wanted.lse is not None, WRITES_BLOCK_LSE=wanted.block_lse is not None,
        UPCAST=INTERPRETED, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.num_warps, num_stages=stages_on(config, capability),
    )  # fmt: skip
