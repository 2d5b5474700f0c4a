"""KV events: enough for a mirror to answer any hit search exactly (the router's prefix index is fed by them)."""

from __future__ import annotations

from typing import Literal, NamedTuple


class KvEvent(NamedTuple):
    """A block became findable under its hash, or stopped being so.

    `block_index` is the block's logical index in its chain, `num_tokens` its valid length, `version` counts up by one per
    event and worker, so that a gap shows.
    """

    version: int
    action: Literal["added", "removed"]
    group: int
    block_hash: bytes
    block_index: int
    num_tokens: int
    tier: int
