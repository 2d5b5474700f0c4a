"""How a worker's prefix index changes: enough for a mirror to answer any hit search exactly (a router's index is fed by it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from transom_worker.kvcache.groups import GroupSpec


class KvRun(NamedTuple):
    """Blocks of one group that became findable under these digests, or stopped being so. Each counts as one change."""

    action: Literal["added", "removed"]
    group: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUpdate:
    """The index's changes from version `after` to `version`, in order; or, if `whole`, all that it holds at `version`."""

    after: int
    version: int
    runs: tuple[KvRun, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a mirror needs besides the index to search as the worker does."""

    groups: tuple[GroupSpec, ...]
    block_size: int
    window_repair: bool
    enable_prefix_caching: bool
