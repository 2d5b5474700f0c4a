"""The messages by which a router keeps a mirror of a worker's prefix index, so that both search it with equal results.

The prefix index maps the digest of each cached block (a hash of its tokens and all tokens before them) to the block, per KV cache
group. Its *version* is the number of changes since the worker's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from transom_worker.kvcache.groups import GroupSpec


class KvRun(NamedTuple):
    """Blocks of one group that were added to the index under these digests, or removed. Each digest counts as one change."""

    action: Literal["added", "removed"]
    group: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUpdate:
    """The index's changes from version `after` to `version`, in order; if `whole`, the whole index at `version` instead."""

    after: int
    version: int
    runs: tuple[KvRun, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The settings of a worker's cache that a mirror needs, besides the index, to search as the worker does."""

    groups: tuple[GroupSpec, ...]
    block_size: int
    window_repair: bool
    enable_prefix_caching: bool
