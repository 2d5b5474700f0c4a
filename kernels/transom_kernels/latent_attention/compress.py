"""The operator `pool_rows`: pools the (kv, gate) rows of several tokens into one compressed entry (DeepSeek V4's compressor).

An entry covers R tokens. With overlap it also reads the R tokens before (G = 2 groups). Each token's kv and gate rows have G
*series* of D channels; series `g` is used by the entry for which the token is in group `g`:

    R = 4, G = 2, entry 1 (tokens 4 to 7):   tokens 0 1 2 3  with their series 0,   tokens 4 5 6 7  with their series 1

Legend: E entries, R tokens per entry, G groups of R tokens that an entry reads (its own last), D width of an entry.
"""

from __future__ import annotations

import torch

from transom_kernels.latent_attention.rows import read_rows, rows_per_tile
from transom_kernels.launch import uses_triton


def pool_rows(
    kv_cache: torch.Tensor, gate_cache: torch.Tensor, slots: torch.Tensor, position_bias: torch.Tensor
) -> torch.Tensor:
    """Entries [E, D] float32 from the rows of `kv_cache` and `gate_cache` [ids, P, 1, G * D] at `slots` [E, G * R].

    Each channel of an entry is the sum of the G * R kv values of this channel, weighted by softmax(gate + bias) over these rows, in
    float32. `position_bias` [R, G * D] is by the token's place in its group. Rows with a negative slot (before the first token)
    have weight zero.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    ratio, channels = position_bias.shape
    num_groups, rest = divmod(slots.shape[1], ratio)
    if rest or channels % max(1, num_groups) or kv_cache.shape[3] != channels or gate_cache.shape != kv_cache.shape:
        raise ValueError(
            f"slots {tuple(slots.shape)}, bias {tuple(position_bias.shape)} and caches {tuple(kv_cache.shape)}, "
            f"{tuple(gate_cache.shape)} do not fit: rows in groups of the bias's length, as many series as groups."
        )
    if any(tensor.dtype != torch.float32 for tensor in (kv_cache, gate_cache, position_bias)):
        raise ValueError("kv, gate and position bias must be float32: a compressor's state is kept exactly.")
    if uses_triton(kv_cache):
        from transom_kernels.latent_attention.gpu import pool_rows_triton

        return pool_rows_triton(kv_cache, gate_cache, slots, position_bias)
    width = channels // num_groups
    bias = position_bias.view(ratio, num_groups, width).transpose(0, 1).reshape(num_groups * ratio, width)
    out = position_bias.new_empty(len(slots), width)
    step = rows_per_tile(slots.shape[1] * channels)
    for begin in range(0, len(slots), step):
        tile = slots[begin : begin + step]
        kv, gate = (_own_series(read_rows(cache, tile), num_groups) for cache in (kv_cache, gate_cache))
        gate = (gate + bias).masked_fill_((tile < 0)[..., None], float("-inf"))
        out[begin : begin + step] = kv.mul_(gate.softmax(dim=1)).sum(dim=1)
    return out


def _own_series(rows: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Series `g` of the rows of group `g`: [E, G * R, D] of rows [E, G * R, G * D]."""
    if num_groups == 1:
        return rows
    entries, length, channels = rows.shape
    split = rows.view(entries, num_groups, length // num_groups, num_groups, channels // num_groups)
    return torch.cat([split[:, group, :, group] for group in range(num_groups)], dim=1)
