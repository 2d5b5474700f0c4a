"""The argument words of a paged cache: where it lies, and its strides.

Legend: P block size in tokens, KVH KV heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class CacheArguments(NamedTuple):
    """A cache [ids, P, KVH, elements of a row], or the scales [ids, P, KVH] of one; strides in bytes."""

    cache: torch.Tensor | None
    block: int
    token: int
    head: int

    @classmethod
    def of(cls, cache: torch.Tensor | None) -> CacheArguments:
        """The words of a tensor; zeros where there is none."""
        if cache is None:
            return cls(None, 0, 0, 0)
        size = cache.element_size()
        block, token, head = cache.stride()[:3]
        return cls(cache, block * size, token * size, head * size)
