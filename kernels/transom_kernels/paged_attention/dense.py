"""A dense tile: matmul, softmax, matmul over gathered keys, query heads of one KV head folded into rows.

At one query row per sequence in bfloat16 which is faster depends on the CPU: see `flash_decodes`.

Legend: n sequences, R query rows each, KVH heads, G query heads per KV head, L gathered keys, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.causal import flash
from transom_kernels.paged_attention.columns import span_ids
from transom_kernels.paged_attention.gather import BlockSet, gather_kv
from transom_kernels.paged_attention.plan import Reader
from transom_kernels.paged_attention.rule import MaskRule

_FEW_ROWS = 16
_NOWHERE = 2**40  # logical block of padding: behind every query


@dataclass(slots=True, kw_only=True)
class DenseTile:
    """What a dense tile needs in every layer."""

    num_sequences: int
    rows_each: int
    rows: slice | torch.Tensor  # of the batch
    wanted: BlockSet
    bias: torch.Tensor | None  # [n, 1, R, 1, L], 0 or -inf; None: every row sees every key


def build_dense(batch: PagedBatch, rule: MaskRule, readers: tuple[Reader, ...], like: torch.Tensor) -> DenseTile:
    """Resolve a planned tile to tensors on the device and in the dtype of `like`."""
    blocks, logical = _block_lists(batch, readers)
    seen = _visibility(batch, rule, readers, logical)
    bias, blank = None, None
    if not seen.all():
        bias = torch.zeros(seen.shape, dtype=like.dtype).masked_fill_(~seen, float("-inf"))
        bias = bias[:, None, :, None, :].to(like.device)
        unread = (~seen.any(dim=1)).reshape(-1).nonzero().squeeze(1)
        blank = unread.to(like.device) if len(unread) else None
    return DenseTile(
        num_sequences=len(readers),
        rows_each=readers[0].count,
        rows=_rows(readers, like.device),
        wanted=BlockSet(blocks=torch.tensor(blocks, device=like.device), blank=blank),
        bias=bias,
    )


def attend_dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tile: DenseTile,
    scale: float,
    soft_cap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the tile's rows, [n * R, KVH * G, Dv]."""
    n, rows, heads = tile.num_sequences, tile.rows_each, k_cache.shape[2]
    k, v = gather_kv(k_cache, v_cache, tile.wanted)
    group = q.shape[1] // heads
    if rows == 1 and soft_cap is None and flash_decodes(q.dtype) and k.shape == v.shape and q.device.type == "cpu":
        return _attend_flash(q[tile.rows], k, v, tile, scale, sink_logits)
    folded = q[tile.rows].view(n, rows, heads, group, -1).transpose(1, 2).reshape(n * heads, rows * group, -1)
    scores = _scores(folded, k, scale)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if tile.bias is not None:
        scores.view(n, heads, rows, group, -1).add_(tile.bias)
    out = torch.bmm(torch.softmax(scores, dim=-1), v).view(n, heads, rows, group, -1)
    if sink_logits is not None:
        out = out * _kept_share(scores.view(n, heads, rows, group, -1), sink_logits).to(out.dtype)
    return out.transpose(1, 2).reshape(n * rows, heads * group, -1)


@cache
def flash_decodes(dtype: torch.dtype) -> bool:
    """Whether torch's flash attention beats three separate products at one query row per sequence.

    In bfloat16 it does where its tiles run on AMX (1.4 to 2 times), and loses by as much on CPUs without.
    """
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return dtype is torch.bfloat16 and supported is not None and bool(supported())


def _attend_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: DenseTile,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """One row per sequence, [n, KVH * G, Dv]: the group's heads are the kernel's query rows."""
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
    """q k^T * scale, [n * KVH, R * G, L]; with few rows k q^T is up to 1.8 times as fast, transposing included."""
    if folded.shape[1] > _FEW_ROWS:
        left, right = folded, k.transpose(1, 2)
    else:
        left, right = k, folded.transpose(1, 2)
    scores = folded.new_empty(left.shape[0], left.shape[1], right.shape[2])
    torch.baddbmm(scores, left, right, beta=0.0, alpha=scale, out=scores)
    return scores if left is folded else scores.transpose(1, 2).contiguous()


def _kept_share(scores: torch.Tensor, sink_logits: torch.Tensor) -> torch.Tensor:
    """What the sink leaves of each row: exp(lse) / (exp(lse) + exp(sink)), [n, KVH, R, G, 1]."""
    lse = torch.logsumexp(scores.float(), dim=-1, keepdim=True)
    return torch.sigmoid(lse - sink_logits.float().view(1, scores.shape[1], 1, scores.shape[3], 1))


def _block_lists(batch: PagedBatch, readers: tuple[Reader, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """Block ids and logical blocks per sequence, padded to the longest (with its own first block, at no position)."""
    width = max(reader.num_blocks for reader in readers)
    ids: list[list[int]] = []
    logical: list[list[int]] = []
    for reader in readers:
        found = span_ids(batch, reader.b, 0, reader.sink_blocks) + span_ids(
            batch, reader.b, reader.first_block, reader.end_block
        )
        padding = width - len(found)
        ids.append(found + found[:1] * padding)
        run = range(reader.first_block, reader.end_block)
        logical.append([*range(reader.sink_blocks), *run, *([_NOWHERE] * padding)])
    return ids, logical


def _visibility(
    batch: PagedBatch, rule: MaskRule, readers: tuple[Reader, ...], logical: list[list[int]]
) -> torch.Tensor:
    """Which gathered keys each row sees, [n, R, L] on the CPU."""
    size = batch.block_size
    keys = (torch.tensor(logical)[:, :, None] * size + torch.arange(size)).flatten(1)
    starts = torch.tensor([reader.start for reader in readers])
    positions = starts[:, None] + torch.arange(readers[0].count)
    attend_from = torch.tensor([batch.attend_from_host[reader.b] for reader in readers])
    return rule.visible(positions, keys, attend_from[:, None, None])


def _rows(readers: tuple[Reader, ...], device: torch.device) -> slice | torch.Tensor:
    rows = [row for reader in readers for row in range(reader.row, reader.row + reader.count)]
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
