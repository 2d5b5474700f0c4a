"""Dense tiles of the CPU implementation: matmul, softmax, matmul over gathered keys, with a mask where rows see different keys.

`tile_plan.py` says which rows form a dense tile. The query heads of one KV head are folded into the rows of the matmul. With one
query row per sequence in bfloat16, torch's flash attention is faster on some CPUs: see `flash_is_faster_for_decoding`.

Legend: n sequences, R query rows of each, KVH KV heads, G query heads per KV head, L gathered keys, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.block_lookup import physical_blocks
from transom_kernels.paged_attention.causal import flash, flash_runs
from transom_kernels.paged_attention.gather import BlockSet, TileKv, gather_kv
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.paged_attention.tile_plan import QueryRows

_MAX_TRANSPOSED_ROWS = 16  # up to so many query rows k q^T is faster than q k^T
_PADDING_BLOCK = 2**40  # the logical block number of padding: its keys lie behind every query, so no row sees them


@dataclass(slots=True, kw_only=True)
class DenseTile:
    """A dense tile, resolved to tensors that every layer of the step uses."""

    num_sequences: int
    rows_per_sequence: int
    rows: slice | torch.Tensor  # rows of the batch
    block_set: BlockSet
    bias: torch.Tensor | None  # [n, 1, R, 1, L], 0 or -inf; None: every row sees every gathered key


def build_dense(batch: PagedBatch, rule: MaskRule, sequences: tuple[QueryRows, ...], like: torch.Tensor) -> DenseTile:
    """Resolve a planned tile to tensors on the device and in the dtype of `like`."""
    blocks, logical = _block_lists(batch, sequences)
    visible = _visibility(batch, rule, sequences, logical)
    bias, zeroed_keys = None, None
    if not visible.all():
        bias = torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, float("-inf"))
        bias = bias[:, None, :, None, :].to(like.device)
        unseen_keys = (~visible.any(dim=1)).reshape(-1).nonzero().squeeze(1)
        zeroed_keys = unseen_keys.to(like.device) if len(unseen_keys) else None
    return DenseTile(
        num_sequences=len(sequences),
        rows_per_sequence=sequences[0].count,
        rows=_rows(sequences, like.device),
        block_set=BlockSet(blocks=torch.tensor(blocks, device=like.device), zeroed_keys=zeroed_keys),
        bias=bias,
    )


def attend_dense(
    q: torch.Tensor,
    kv: TileKv,
    tile: DenseTile,
    scale: float,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the tile's rows, [n * R, KVH * G, Dv]; options are those of `op.paged_attention`."""
    n, rows, heads = tile.num_sequences, tile.rows_per_sequence, kv.k_cache.shape[2]
    k, v = gather_kv(kv, tile.block_set)
    group = q.shape[1] // heads
    if (
        rows == 1
        and soft_cap is None
        and flash_is_faster_for_decoding(q.dtype)
        and k.shape == v.shape
        and q.device.type == "cpu"
    ):
        return _attend_flash(q[tile.rows], k, v, tile, scale, sink_logits)
    folded = q[tile.rows].view(n, rows, heads, group, -1).transpose(1, 2).reshape(n * heads, rows * group, -1)
    scores = _scores(folded, k, scale)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if tile.bias is not None:
        scores.view(n, heads, rows, group, -1).add_(tile.bias)
    out = torch.bmm(torch.softmax(scores, dim=-1), v).view(n, heads, rows, group, -1)
    if sink_logits is not None:
        out = out * _share_beside_sink(scores.view(n, heads, rows, group, -1), sink_logits).to(out.dtype)
    return out.transpose(1, 2).reshape(n * rows, heads * group, -1)


@cache
def flash_is_faster_for_decoding(dtype: torch.dtype) -> bool:
    """Whether torch's flash attention is faster than matmul, softmax and matmul at one query row per sequence.

    In bfloat16 it is 1.4 to 2 times as fast where the CPU has AMX, and slower by as much on CPUs without AMX.
    """
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return dtype is torch.bfloat16 and supported is not None and bool(supported()) and flash_runs(dtype)


def _attend_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: DenseTile,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row per sequence, [n, KVH * G, Dv]: the G query heads of a KV head are flash attention's query rows."""
    n, heads = tile.num_sequences, k.shape[0] // tile.num_sequences
    mask = None if tile.bias is None else tile.bias[:, :, :, 0]
    rows, keys, values = (
        q.reshape(n, heads, -1, q.shape[2]),
        k.view(n, heads, *k.shape[1:]),
        v.view(n, heads, *v.shape[1:]),
    )
    out, lse = flash(rows, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    if sink_logits is not None:
        out = out * torch.sigmoid(lse - sink_logits.float().view(1, heads, -1))[..., None].to(out.dtype)
    attended: torch.Tensor = out.reshape(n, -1, out.shape[3])
    return attended


def _scores(folded: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """q k^T * scale, [n * KVH, R * G, L]. With few rows k q^T is up to 1.8 times as fast, including the transposition."""
    if folded.shape[1] > _MAX_TRANSPOSED_ROWS:
        left, right = folded, k.transpose(1, 2)
    else:
        left, right = k, folded.transpose(1, 2)
    scores = folded.new_empty(left.shape[0], left.shape[1], right.shape[2])
    torch.baddbmm(scores, left, right, beta=0.0, alpha=scale, out=scores)
    return scores if left is folded else scores.transpose(1, 2).contiguous()


def _share_beside_sink(scores: torch.Tensor, sink_logits: torch.Tensor) -> torch.Tensor:
    """The part of the softmax that is left beside the sink: exp(lse) / (exp(lse) + exp(sink)), [n, KVH, R, G, 1]."""
    lse = torch.logsumexp(scores.float(), dim=-1, keepdim=True)
    return torch.sigmoid(lse - sink_logits.float().view(1, scores.shape[1], 1, scores.shape[3], 1))


def _block_lists(batch: PagedBatch, sequences: tuple[QueryRows, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """Physical and logical blocks of each sequence, padded to the longest with its first physical block as `_PADDING_BLOCK`."""
    width = max(query_rows.num_blocks for query_rows in sequences)
    ids: list[list[int]] = []
    logical: list[list[int]] = []
    for query_rows in sequences:
        found = physical_blocks(batch, query_rows.b, 0, query_rows.sink_blocks) + physical_blocks(
            batch, query_rows.b, query_rows.first_block, query_rows.end_block
        )
        padding = width - len(found)
        ids.append(found + found[:1] * padding)
        run = range(query_rows.first_block, query_rows.end_block)
        logical.append([*range(query_rows.sink_blocks), *run, *([_PADDING_BLOCK] * padding)])
    return ids, logical


def _visibility(
    batch: PagedBatch, rule: MaskRule, sequences: tuple[QueryRows, ...], logical: list[list[int]]
) -> torch.Tensor:
    """Which gathered keys each row sees, [n, R, L] on the CPU."""
    size = batch.block_size
    keys = (torch.tensor(logical)[:, :, None] * size + torch.arange(size)).flatten(1)
    starts = torch.tensor([query_rows.start for query_rows in sequences])
    positions = starts[:, None] + torch.arange(sequences[0].count)
    attend_from = torch.tensor([batch.attend_from_host[query_rows.b] for query_rows in sequences])
    return rule.visible(positions, keys, attend_from[:, None, None])


def _rows(sequences: tuple[QueryRows, ...], device: torch.device) -> slice | torch.Tensor:
    """The tile's rows of the batch; a slice where they are adjacent, which reads them without a copy."""
    rows = [row for query_rows in sequences for row in range(query_rows.row, query_rows.row + query_rows.count)]
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
