"""The operator `select_entries`: DeepSeek V4's indexer, which selects the compressed entries that each query reads.

Legend: T queries, H indexer heads, D width, B sequences, N entries of the longest sequence, K selected entries, t queries of a
tile.
"""

from __future__ import annotations

import torch

from transom_kernels.latent_attention.rows import read_rows, rows_per_tile
from transom_kernels.launch import uses_triton


def select_entries(
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
    """The `top_k` best of the entries that each query sees: entry numbers [T, min(top_k, N)] int64, -1 where it sees fewer.

    `q` is [T, H, D], `head_weights` [T, H] float32, `key_cache` [ids, P, 1, D]. Query `t` sees the first `num_visible[t]` entries
    of sequence `sequence[t]`, whose keys lie at the slots `slots[sequence[t]]` [N]. An entry's score is `sum_h head_weights[h] *
    relu(q_h . k) * scale`, in float32.

    Raises:
        ValueError: shapes do not fit.
    """
    if head_weights.shape != q.shape[:2] or key_cache.shape[2:] != (1, q.shape[2]) or len(sequence) != len(q):
        raise ValueError(
            f"q {tuple(q.shape)}, weights {tuple(head_weights.shape)}, keys {tuple(key_cache.shape)} and "
            f"{len(sequence)} sequence numbers do not fit: one head of keys, a weight per query head."
        )
    if uses_triton(q) and q.stride(2) == 1:
        from transom_kernels.latent_attention.gpu import select_entries_triton

        return select_entries_triton(q, head_weights, key_cache, slots, sequence, num_visible, top_k=top_k, scale=scale)
    num_entries = slots.shape[1]
    chosen = min(top_k, num_entries)
    out = torch.full((len(q), chosen), -1, dtype=torch.int64, device=q.device)
    numbers = torch.arange(num_entries, device=q.device)
    step = rows_per_tile(num_entries * max(q.shape[1], q.shape[2]))
    for begin in range(0, len(q) if chosen else 0, step):
        tile = slice(begin, begin + step)
        unseen = numbers >= num_visible[tile, None]
        keys = read_rows(key_cache, slots[sequence[tile]].masked_fill(unseen, -1)).float()  # [t, N, D]
        products = torch.matmul(q[tile].float(), keys.transpose(1, 2)).relu_().mul_(scale)  # [t, H, N]
        scores = torch.matmul(head_weights[tile, None], products)[:, 0].masked_fill_(unseen, float("-inf"))
        best = scores.topk(chosen, dim=1).indices
        out[tile] = best.masked_fill_(best >= num_visible[tile, None], -1)
    return out
