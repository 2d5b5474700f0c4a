"""The specification of `policy_attention` and `add_block_mass`: in float32, one sequence at a time.

Legend: T query tokens, R rows of one sequence, L keys that its table holds, H query heads, D key width, Dv value width, N table
columns, P block size in tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.policy_attention.batch import PolicyBatch
from transom_kernels.quantised_kv import dequantise_rows, head_width

LOG2_E = 1.4426950408889634


def policy_attention_reference(
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
    out = q.new_zeros(q.shape[0], q.shape[1], head_width(v_cache))
    for rows, table, key_positions, visible in _sequences(batch):
        scores = _scores(q, sink_q, rows, table, key_positions, k_cache, k_scale, batch, scale, soft_cap)
        scores = scores.masked_fill(~visible.to(q.device), float("-inf"))
        if sink_logits is not None:
            sinks = sink_logits.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        top = scores.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)  # rows without keys: no -inf - -inf
        weights = torch.exp(scores - top[..., None])
        total = weights.sum(dim=-1)
        if statistics is not None:
            statistics[rows] = torch.stack([top.T * LOG2_E, total.T], dim=-1)
        weights = (weights / total.clamp(min=1e-30)[..., None])[..., : len(key_positions)]
        values = _gather(v_cache, v_scale, table, q.shape[1], batch)[:, visible.any(dim=0)]
        out[rows] = torch.einsum("hrl,hle->rhe", weights[..., visible.any(dim=0)], values).to(q.dtype)
    return out


def add_block_mass_reference(
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
    for b, (rows, table, key_positions, visible) in enumerate(_sequences(batch)):
        scores = _scores(q, sink_q, rows, table, key_positions, k_cache, k_scale, batch, scale, soft_cap) * LOG2_E
        top, total = statistics[rows, :, 0].T[..., None], statistics[rows, :, 1].T[..., None]
        share = torch.where(visible.to(q.device), torch.exp2(scores - top) / total, 0.0)
        by_column = share.sum(dim=(0, 1)).view(len(table), batch.block_size).sum(dim=-1)
        mass[b, : len(table)] += by_column


def _sequences(batch: PolicyBatch) -> list[tuple[slice, list[int], torch.Tensor, torch.Tensor]]:
    """Of each sequence: its rows, its block ids, the positions [L] of their keys, and the mask [R, L]."""
    found = []
    for b, columns in enumerate(batch.num_columns.tolist()):
        first, end = batch.query_offset[b : b + 2].tolist()
        start, window, sinks = int(batch.start[b]), int(batch.window[b]), int(batch.sinks[b])
        table = batch.block_table[b, :columns].tolist()
        blocks = batch.key_blocks[b, :columns].cpu().long()
        keys = (blocks[:, None] * batch.block_size + torch.arange(batch.block_size)).flatten()
        positions = torch.arange(start, start + end - first)[:, None]
        visible = keys <= positions
        if window:
            visible = visible & ((keys > positions - window) | (keys < sinks))
        found.append((slice(first, end), table, keys, visible))
    return found


def _scores(
    q: torch.Tensor,
    sink_q: torch.Tensor | None,
    rows: slice,
    table: list[int],
    key_positions: torch.Tensor,
    k_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    batch: PolicyBatch,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Scores [H, R, L]; what the mask hides may be NaN. Sink keys are multiplied with `sink_q`."""
    keys = _gather(k_cache, k_scale, table, q.shape[1], batch)
    scores = torch.einsum("rhd,hld->hrl", q[rows].float(), keys)
    if sink_q is not None and rows.stop > rows.start:
        b = int(batch.row_sequence[rows.start])
        is_sink = (key_positions < int(batch.sinks[b])).to(q.device)
        scores = torch.where(is_sink, torch.einsum("rhd,hld->hrl", sink_q[rows].float(), keys), scores)
    scores = scores * scale
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _gather(
    cache: torch.Tensor, scales: torch.Tensor | None, table: list[int], num_heads: int, batch: PolicyBatch
) -> torch.Tensor:
    """Keys or values [H, L, width] of the table's blocks, in float32."""
    gathered = (
        cache[table] if scales is None else dequantise_rows(cache[table], scales[table])
    )  # [columns, P, KVH, width]
    by_head = gathered.float().flatten(0, 1).transpose(0, 1)
    return by_head.repeat_interleave(num_heads // by_head.shape[0], dim=0)
