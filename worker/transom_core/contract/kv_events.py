"""The messages by which a router keeps a mirror of a worker's prefix index, so that both search it with equal results.

The prefix index maps the digest of each cached block (a hash of its tokens and all tokens before them) to the block, per KV cache
group and tier (`tiers`). Of the disk tier it has the digests of the blocks that have files (`disk.index`). Its *version* is the
number of changes since the worker's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.tiers import DEVICE


class KvRun(NamedTuple):
    """Blocks of one group that were added to a tier's index under these digests, or removed. Each digest counts as one change."""

    action: Literal["added", "removed"]
    group: int
    digests: tuple[bytes, ...]
    tier: int = DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUpdate:
    """The index's changes from version `after` to `version`, in order; if `whole`, the whole index at `version` instead.

    `rates` are those that hold at `version`; None: they have not changed, or there is no host tier. A change of the rates counts as
    one change.
    """

    after: int
    version: int
    runs: tuple[KvRun, ...]
    whole: bool = False
    rates: LoadRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The settings of a worker's cache that a mirror needs, besides the index, to search as the worker does.

    `identity` is that of the model and of all that decides the numbers in its blocks; empty where it is not known. It is part of
    every digest.
    """

    groups: tuple[GroupSpec, ...]
    block_size: int
    window_repair: bool
    enable_prefix_caching: bool
    has_host_tier: bool = False
    has_disk_tier: bool = False
    identity: str = ""
