"""`ChangeLog`: records the changes of the prefix index, in order, until the engine takes them and sends them to routers.

The prefix index maps each cached block's digest (a hash of its tokens and all tokens before them) to its block id. Its *version* is
the number of changes since start: publishing 3 blocks and evicting 1 brings version 10 to version 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from transom_worker.kvcache.events import KvRun, KvUpdate

MAX_UNREAD_CHANGES = 65_536


class ChangeLog:
    """Counts every change of the index, and keeps the changes that were not taken yet, at most `max_unread` of them.

    `groups` is the index itself: per group a block id by digest. When there are too many changes, `take` returns the whole index.
    """

    def __init__(self, groups: Sequence[Mapping[bytes, int]]) -> None:
        self.version = 0
        self._groups = groups
        self.max_unread = MAX_UNREAD_CHANGES
        self.unread_runs: list[KvRun] = []
        self._taken = 0  # version up to which changes were taken
        self._num_unread = 0

    def add(self, action: Literal["added", "removed"], group: int, digests: Sequence[bytes]) -> None:
        """Record that blocks of one group were added to the index or removed from it."""
        self._note(KvRun(action, group, tuple(digests)), len(digests))

    def take(self) -> KvUpdate | None:
        """Return the changes since the last call, or the whole index if they are too many; None if there are none."""
        if self._taken == self.version:
            return None
        if self._num_unread > self.max_unread:
            update = self.whole()
        else:
            update = KvUpdate(after=self._taken, version=self.version, runs=tuple(self.unread_runs))
        self.unread_runs = []
        self._num_unread = 0
        self._taken = self.version
        return update

    def whole(self) -> KvUpdate:
        """Return the whole index. The changes that `take` will return stay."""
        runs = tuple(KvRun("added", group, tuple(found)) for group, found in enumerate(self._groups))
        return KvUpdate(after=self.version, version=self.version, runs=runs, whole=True)

    def _note(self, run: KvRun, count: int) -> None:
        self.version += count
        self._num_unread += count
        if self._num_unread > self.max_unread:
            self.unread_runs = []
        else:
            self.unread_runs.append(run)
