"""A worker's prefix index as a router knows it: fed by the worker's updates, searched by the worker's own hit search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transom_worker.kvcache.events import CacheShape, KvUpdate
from transom_worker.kvcache.groups import GroupSpec
from transom_worker.kvcache.prefix_search import PrefixHit, find_hit, hit_limit
from transom_worker.kvcache.retention import Retention


class PrefixIndexMirror:
    """Which blocks a worker can find, at one version of its index: at equal versions `find` answers what the worker would.

    Empty, and at version 0, until a whole index has come. Not thread-safe.
    """

    def __init__(self, shape: CacheShape, *, max_model_len: int = 0) -> None:
        self.shape = shape
        self.version = 0
        self._retentions = _retentions(shape.groups)
        for retention in self._retentions:  # now, that the first long prompt need not wait for the tables
            if not retention.keeps_everything:
                retention.first_live_at(max_model_len // shape.block_size)
        self._groups: tuple[set[bytes], ...] = ()
        self._forget()

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found, of all groups."""
        return sum(map(len, self._groups))

    def apply(self, update: KvUpdate) -> bool:
        """Follow the index; False on a gap, once: everything is forgotten, and the worker must be asked for the whole index.

        Until that comes (and before the first one) other updates say nothing, and are ignored.
        """
        if update.whole:
            self._forget()
            self._is_whole = True
        elif not self._is_whole:
            return True
        elif update.after != self.version:
            self._forget()
            return False
        for action, group, digests in update.runs:
            found = self._groups[group]
            if action == "added":
                found.update(digests)
            else:
                found.difference_update(digests)
        self.version = update.version
        return True

    def find(self, chain: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """The longest reusable prefix of `num_tokens` tokens with that chain of digests, one per `shape.block_size` tokens."""
        limit = hit_limit(num_tokens, self.shape.block_size)
        return find_hit(self._retentions, self._groups, chain, limit, window_repair=self.shape.window_repair)

    def _forget(self) -> None:
        self._groups = tuple(set() for _ in self.shape.groups)
        self._is_whole = False
        self.version = 0


@lru_cache(maxsize=16)
def _retentions(groups: tuple[GroupSpec, ...]) -> tuple[Retention, ...]:
    """Their tables are long, and the same for all workers of a kind."""
    return tuple(map(Retention, groups))
