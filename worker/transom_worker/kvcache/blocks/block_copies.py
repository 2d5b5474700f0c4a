"""`BlockCopy`: the copy of one block's contents, within a tier or between tiers."""

from __future__ import annotations

from typing import NamedTuple

from transom_core.kv_cache.tiers import DEVICE


class BlockCopy(NamedTuple):
    """A copy of the contents of block `source` to block `target` of the same group.

    With ticket 0 it is made before the next forward pass. On the disk, `digest` names the block, and that end's id is 0.
    """

    group: int
    source: int
    target: int
    source_tier: int = DEVICE
    target_tier: int = DEVICE
    ticket: int = 0
    digest: bytes = b""
