"""The specification of `kv_write`: one token at a time.

Legend: T tokens, KVH KV heads, P block size in tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.quantised_kv import FORMATS, quantise_rows


def kv_write_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """The contract is that of `op.kv_write`."""
    k_scale, v_scale = kv_scales or (None, None)
    write_rows(k, k_cache, slots, k_scale)
    write_rows(v, v_cache, slots, v_scale)


def write_rows(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Write row `t` to slot `slots[t]` of a cache [ids, P, heads, elements], quantised where it has scales [ids, P, heads].

    A token whose slot is below 0 is not written.
    """
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            if scale is None:
                cache[block, offset] = rows[token].to(cache.dtype)
            else:
                cache[block, offset], scale[block, offset] = quantise_rows(rows[token], FORMATS[cache.dtype])
