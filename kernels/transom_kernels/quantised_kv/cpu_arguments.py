"""The argument words by which CPU kernels find the rows of a paged cache: its address and strides.

Legend: P block size in tokens, KVH KV heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class CacheArguments(NamedTuple):
    """A cache [ids, P, KVH, elements of a row], or the scales [ids, P, KVH] of a cache; strides are in bytes."""

    cache: torch.Tensor | None
    block: int
    token: int
    head: int

    @classmethod
    def of(cls, cache: torch.Tensor | None) -> CacheArguments:
        """Return the words of a tensor; zeros if it is None."""
        if cache is None:
            return cls(None, 0, 0, 0)
        size = cache.element_size()
        block, token, head = cache.stride()[:3]
        return cls(cache, block * size, token * size, head * size)
