"""The specification of `kv_write`: one token at a time.

Legend: T tokens, KVH KV heads, P block size in tokens.
"""

from __future__ import annotations

import torch


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """The contract is that of `op.kv_write`."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, slot % block_size] = k[token]
        v_cache[slot // block_size, slot % block_size] = v[token]
