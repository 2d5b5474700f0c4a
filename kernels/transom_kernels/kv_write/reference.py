"""One token at a time: the specification of `kv_write`."""

from __future__ import annotations

import torch


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `op.kv_write`."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, slot % block_size] = k[token]
        v_cache[slot // block_size, slot % block_size] = v[token]
