"""Launches the Triton kernels of DeepSeek V4's latent attention (`kernel.py`).

Legend: T queries, H heads, D width, W window slots, K entry slots, N entries of the longest sequence, E entries that are pooled.
"""

from __future__ import annotations

import torch

from transom_kernels.latent_attention.inputs import LatentInputs
from transom_kernels.latent_attention.kernel import attend_rows, pool, score_entries
from transom_kernels.latent_attention.tuning import (
    POOL_CHANNELS,
    POOL_ROWS,
    attend_config,
    queries_at_once,
    score_config,
    score_rounds,
)
from transom_kernels.launch import INTERPRETED, next_power_of_two, shared_bytes


def latent_attention_triton(inputs: LatentInputs) -> torch.Tensor:
    """Return attention [T, H, D] of `q` [T, H, D]: softmax of (scale q . r over a query's rows r, and sink_logits) times r.

    Caches are [ids, P, 1, D]. The slots [T, W] and [T, K] name each query's rows; negative slots name none.
    """
    q, window_cache, window_slots = inputs.q, inputs.window_cache, inputs.window_slots
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    entry_cache, entry_slots = inputs.entry_cache, inputs.entry_slots
    if entry_cache is None or entry_slots is None:
        entry_cache, entry_slots = window_cache, window_slots[:, :0]
    config = attend_config(heads, width, q.element_size(), shared_bytes(q.device))
    if tokens:
        attend_rows[(tokens, -(-heads // config.block_h))](
            q, window_cache, entry_cache, window_slots.contiguous(), entry_slots.contiguous(), inputs.sink_logits, out,
            inputs.scale, heads,
            window_slots.shape[1], entry_slots.shape[1], q.stride(0), q.stride(1),
            *window_cache.stride()[:2], *entry_cache.stride()[:2],
            D=width, WINDOW_P=window_cache.shape[1], ENTRY_P=entry_cache.shape[1], UPCAST=INTERPRETED,
            BLOCK_H=config.block_h, BLOCK_D=next_power_of_two(width), BLOCK_N=config.block_n,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def select_entries_triton(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    sequence: torch.Tensor,
    num_visible: torch.Tensor,
    *,
    top_k: int,
    scale: float,
) -> torch.Tensor:
    """Return the `top_k` entries [T, min(top_k, N)] with the largest sum_h head_weights[h] * relu(q_h . key) * scale, or -1.

    Query `t` sees the first `num_visible[t]` entries of sequence `sequence[t]`, whose keys are at `slots[sequence[t]]` [N]. A tile
    of queries is scored at a time, which bounds the memory of scores.
    """
    num_entries = slots.shape[1]
    chosen = min(top_k, num_entries)
    selected = torch.full((len(q), chosen), -1, dtype=torch.int64, device=q.device)
    step = queries_at_once(num_entries)
    scores = torch.empty((min(step, len(q)), num_entries), dtype=torch.float32, device=q.device)
    for begin in range(0, len(q) if chosen else 0, step):
        tile = slice(begin, begin + step)
        rows = scores[: len(q[tile])]
        _score(q[tile], head_weights[tile], key_cache, slots, sequence[tile], num_visible[tile], scale, rows)
        torch.topk(rows, chosen, dim=1, out=(rows.new_empty(len(rows), chosen), selected[tile]))
    return selected.masked_fill_(selected >= num_visible[:, None], -1)


def _score(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    sequence: torch.Tensor,
    num_visible: torch.Tensor,
    scale: float,
    scores: torch.Tensor,
) -> None:
    """Write the scores [t, N] of all entries for a tile of t queries."""
    (tokens, heads, width), num_entries = q.shape, slots.shape[1]
    config, rounds = score_config(heads, width, q.element_size()), score_rounds(tokens)
    score_entries[(tokens, -(-num_entries // (rounds * config.block_n)))](
        q, head_weights.contiguous(), key_cache, slots.contiguous(), sequence, num_visible, scores, scale, heads, num_entries,
        rounds, q.stride(0), q.stride(1), *key_cache.stride()[:2],
        D=width, P=key_cache.shape[1], UPCAST=INTERPRETED, BLOCK_H=config.block_h, BLOCK_D=next_power_of_two(width),
        BLOCK_N=config.block_n, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def pool_rows_triton(
    kv_cache: torch.Tensor, gate_cache: torch.Tensor, slots: torch.Tensor, position_bias: torch.Tensor
) -> torch.Tensor:
    """Return entries [E, D]: for each channel the sum over an entry's G * R rows of softmax(gate + bias) * kv.

    Row `g * R + r` of an entry is at `slots[e, g * R + r]` of both caches [ids, P, 1, G * D]; `op.pool_rows` has an example.
    """
    ratio, channels = position_bias.shape
    num_groups = slots.shape[1] // ratio
    width = channels // num_groups
    out = torch.empty((len(slots), width), dtype=torch.float32, device=slots.device)
    block = min(POOL_CHANNELS, next_power_of_two(width))
    if len(slots):
        pool[(len(slots), -(-width // block))](
            kv_cache, gate_cache, slots.contiguous(), position_bias, out, *kv_cache.stride()[:2], *gate_cache.stride()[:2],
            D=width, R=ratio, G=num_groups, P=kv_cache.shape[1], BLOCK_R=min(POOL_ROWS, next_power_of_two(slots.shape[1])),
            BLOCK_D=block, num_warps=4,
        )  # fmt: skip
    return out
