"""A router's copy of a worker's prefix index: the worker's updates feed it, and the worker's own hit search reads it.

- **prefix index**: which blocks of the worker's prefix cache can be found, as one set of digests for each cache group.
- **digest**: the hash of a hash block's tokens and of all tokens before it. A prompt is a list of digests, one for each hash block.
- **version**: a counter that the worker increments with each change of its index. An update says after which version it applies.

For example, at version 7 an update `after=7, version=9` applies and makes it version 9. An update `after=8` shows a gap: the
mirror forgets everything and the router asks the worker for its whole index (`resync`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transom_worker.kvcache.events import CacheShape, KvUpdate
from transom_worker.kvcache.groups import GroupSpec
from transom_worker.kvcache.prefix_search import PrefixHit, find_hit, hit_limit
from transom_worker.kvcache.retention import Retention


class PrefixIndexMirror:
    """A worker's prefix index at one version. At equal versions `find` returns what the worker itself would find.

    The mirror is empty, and at version 0, until a whole index has come. It is not thread-safe.
    """

    def __init__(self, shape: CacheShape, *, max_model_len: int = 0) -> None:
        self.shape = shape
        self.version = 0
        self._retentions = _retentions(shape.groups)
        for retention in self._retentions:  # build the tables now, so that the first long prompt does not wait for them
            if not retention.keeps_everything:
                retention.first_live_at(max_model_len // shape.block_size)
        self.groups: tuple[
            set[bytes], ...
        ] = ()  # the digests that can be found, by cache group; only `apply` changes them
        self._forget()

    @property
    def num_blocks(self) -> int:
        """The number of blocks that can be found, in all groups."""
        return sum(map(len, self.groups))

    def apply(self, update: KvUpdate) -> bool:
        """Apply an update; False where it shows a gap: the mirror has forgotten everything, and the worker must send its whole
        index.

        Until a whole index comes, other updates are ignored and return True. So each gap is reported once.
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
            found = self.groups[group]
            if action == "added":
                found.update(digests)
            else:
                found.difference_update(digests)
        self.version = update.version
        return True

    def find(self, digests: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """The longest prefix of `num_tokens` tokens that the worker has cached; `digests` has one entry per `shape.block_size`
        tokens."""
        limit = hit_limit(num_tokens, self.shape.block_size)
        return find_hit(self._retentions, self.groups, digests, limit, window_repair=self.shape.window_repair)

    def _forget(self) -> None:
        self.groups = tuple(set() for _ in self.shape.groups)
        self._is_whole = False
        self.version = 0


@lru_cache(maxsize=16)
def _retentions(groups: tuple[GroupSpec, ...]) -> tuple[Retention, ...]:
    """The retention rules of cache groups. Their tables are long, and workers with equal groups share them."""
    return tuple(map(Retention, groups))
