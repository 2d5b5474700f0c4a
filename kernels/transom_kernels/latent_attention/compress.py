"""`pool_rows`: tokens' (kv, gate) rows to one compressed entry each.

Legend: E entries, R tokens per entry, G groups of R tokens that an entry reads (its own the last), D width of an entry.
"""

from __future__ import annotations

import torch

from transom_kernels.latent_attention.rows import read_rows, rows_per_tile
from transom_kernels.launch import uses_triton


def pool_rows(
    kv_cache: torch.Tensor, gate_cache: torch.Tensor, slots: torch.Tensor, position_bias: torch.Tensor
) -> torch.Tensor:
    """Entries from the rows of `kv_cache` and `gate_cache` [ids, P, 1, G * D] at `slots` [E, G * R]; [E, D] float32.

    A row's channels are G series of D. Group `g` of an entry's rows, the earliest first, gives its series `g`: of the group
    before an entry's own the first half is read, of its own the second. Per channel, `softmax(gate + bias)` over all G * R
    rows weighs their kv, in float32; `position_bias` [R, G * D] is by place in the group. Rows with a negative slot (before
    the first token) weigh nothing.

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
    """Of rows [E, G * R, G * D], group g's series g: [E, G * R, D]."""
    if num_groups == 1:
        return rows
    entries, length, channels = rows.shape
    split = rows.view(entries, num_groups, length // num_groups, num_groups, channels // num_groups)
    return torch.cat([split[:, group, :, group] for group in range(num_groups)], dim=1)
