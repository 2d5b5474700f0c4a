"""The specification of `paged_attention`: attention over a paged cache in float32, one sequence at a time, key by key.

Legend: T query tokens, R query rows of one sequence, L the keys that some of them sees, H query heads, D key width, Dv value width,
P block size in tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.block_lookup import physical_blocks
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.quantised_kv import dequantise_rows, head_width


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    rule: MaskRule,
    soft_cap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The contract is that of `op.paged_attention`, with the mask's options in `rule`."""
    out = q.new_zeros(q.shape[0], q.shape[1], head_width(v_cache))
    row = 0
    for b, count in enumerate(batch.count_host):
        if count == 0:
            continue
        positions = torch.arange(batch.start_host[b], batch.start_host[b] + count)
        visible, keys, values = _visible_keys((k_cache, v_cache), kv_scales, batch, b, positions, rule)
        rows = slice(row, row + count)
        out[rows] = _attend(q[rows], keys, values, visible.to(q.device), scale, soft_cap, sink_logits).to(q.dtype)
        row += count
    return out


def _visible_keys(
    caches: tuple[torch.Tensor, torch.Tensor],
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None,
    batch: PagedBatch,
    b: int,
    positions: torch.Tensor,
    rule: MaskRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mask [R, L] of the L keys that some row sees, and those keys and values [L, KVH, width], gathered token by token."""
    context = torch.arange(int(positions[-1]) + 1)
    visible = rule.visible(positions, context, batch.attend_from_host[b])
    read = visible.any(dim=0)
    blocks = [_block(batch, b, position) for position in context[read].tolist()]
    offsets = [position % batch.block_size for position in context[read].tolist()]
    rows = [cache[blocks, offsets] for cache in caches]
    if kv_scales is None:
        return visible[:, read], rows[0].float(), rows[1].float()
    scales = [scale[blocks, offsets] for scale in kv_scales]
    return visible[:, read], dequantise_rows(rows[0], scales[0]), dequantise_rows(rows[1], scales[1])


def _block(batch: PagedBatch, b: int, position: int) -> int:
    logical = position // batch.block_size
    return physical_blocks(batch, b, logical, logical + 1)[0]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale q k^T) v for each head [R, H, Dv]; a head's sink logit adds to the denominator alone.

    Rows without keys give 0.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,lhd->hrl", q.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        sinks = sink_logits.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : keys.shape[0]]
    return torch.einsum("hrl,lhe->rhe", weights, values)
