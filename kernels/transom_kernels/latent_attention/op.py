"""The operator `latent_attention`: one softmax over a window's latent rows, selected compressed entries, and a learned sink.

Terms of DeepSeek V4: a *latent row* is one vector per token that serves as key and value of all heads (MLA with shared K and V). A
*compressed entry* is a latent row that is pooled from the (kv, gate) rows of several tokens. The *indexer* scores entries for each
query, and the query reads the best of them.

Since a row serves all heads, each query gathers its rows once.

Legend: T queries, H heads, D latent width, W rows of the window, K entries, P rows per block, t queries of a tile.
"""

from __future__ import annotations

import torch

from transom_kernels.latent_attention.rows import read_rows, rows_per_tile
from transom_kernels.launch import uses_cpu_kernels, uses_triton


def latent_attention(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    sink_logits: torch.Tensor,
    *,
    scale: float,
    entry_cache: torch.Tensor | None = None,
    entry_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [T, H, D] of `q` [T, H, D] over rows of `window_cache` and `entry_cache` [ids, P, 1, D], all of one dtype.

    Query `t` sees the rows at the slots `window_slots[t]` [W] and `entry_slots[t]` [K], except negative slots. A score is `q k *
    scale`. `sink_logits` [H] float32 add to the softmax's denominator alone. A query that sees no row gets zeros.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(q, window_cache, window_slots, sink_logits)
    if (entry_cache is None) != (entry_slots is None):
        raise ValueError("entry_cache and entry_slots belong together: give both or neither.")
    if entry_cache is not None and entry_slots is not None and entry_slots.shape[1]:
        _check(q, entry_cache, entry_slots, sink_logits)
    else:
        entry_cache = entry_slots = None
    if uses_triton(q) and q.stride(2) == 1:
        from transom_kernels.latent_attention.gpu import latent_attention_triton

        return latent_attention_triton(
            q, window_cache, window_slots, sink_logits, scale=scale, entry_cache=entry_cache, entry_slots=entry_slots
        )
    if uses_cpu_kernels(q):
        from transom_kernels.latent_attention.cpu import fits_cpu_kernel, latent_attention_cpu

        if fits_cpu_kernel(q, window_cache, window_slots, entry_cache, entry_slots):
            return latent_attention_cpu(
                q,
                window_cache,
                window_slots,
                sink_logits,
                scale=scale,
                entry_cache=entry_cache,
                entry_slots=entry_slots,
            )
    pairs = [(window_cache, window_slots)]
    if entry_cache is not None and entry_slots is not None:
        pairs.append((entry_cache, entry_slots))
    return _by_torch(q, pairs, sink_logits, scale)


def _by_torch(
    q: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], sink_logits: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention by torch over (cache, slots) pairs, some queries at a time, since each query's rows are gathered."""
    num_rows = sum(slots.shape[1] for _, slots in pairs)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    step = rows_per_tile(num_rows * q.shape[2])
    for begin in range(0, len(q), step):
        tile = slice(begin, begin + step)
        rows = torch.cat([read_rows(cache, slots[tile]) for cache, slots in pairs], dim=1)  # [t, W + K, D]
        absent = torch.cat([slots[tile] < 0 for _, slots in pairs], dim=1)
        scores = torch.matmul(q[tile], rows.transpose(1, 2)).float().mul_(scale)  # [t, H, W + K]
        scores.masked_fill_(absent[:, None], float("-inf"))
        sinks = sink_logits[:, None].expand(len(rows), -1, 1)
        weights = torch.cat([scores, sinks], dim=2).softmax(dim=2)[:, :, :-1]
        torch.matmul(weights.to(q.dtype), rows, out=out[tile])
    return out


def _check(q: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, sink_logits: torch.Tensor) -> None:
    """Raise ValueError for arguments that do not fit."""
    if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] != q.shape[2] or cache.dtype != q.dtype:
        raise ValueError(
            f"q {tuple(q.shape)} {q.dtype} does not fit a cache {tuple(cache.shape)} {cache.dtype}: one head of q's width "
            "and dtype is read."
        )
    if slots.dim() != 2 or len(slots) != len(q):
        raise ValueError(f"slots {tuple(slots.shape)} do not fit {len(q)} queries: give a row of them for each.")
    if sink_logits.shape != (q.shape[1],) or sink_logits.dtype != torch.float32:
        raise ValueError(
            f"sink_logits {tuple(sink_logits.shape)} {sink_logits.dtype}: give one float32 for each of {q.shape[1]} heads."
        )
