"""The messages with which a worker keeps a router's mirror of its prefix index up to date, so that both find the same hits.

The prefix index maps the digest of each cached block (a hash of its tokens and all tokens before them) to the block, per KV cache
group and tier (`tiers`). For the disk tier it has only the digests of the blocks that have files. The *version* of
the index is the number of its changes since the worker's start.
"""

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

    `rates` are the load rates at `version`; None: they have not changed, or there is no host tier. A change of the rates counts as
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

    `identity` names the model and all else that decides the numbers in its blocks; empty if it is not known. Every digest depends
    on it.
    """

    groups: tuple[GroupSpec, ...]
    block_size: int
    window_repair: bool
    enable_prefix_caching: bool
    has_host_tier: bool = False
    has_disk_tier: bool = False
    identity: str = ""
