"""What became findable and what was evicted, in order, until somebody takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from transom_worker.kvcache.events import KvRun, KvUpdate

MAX_UNREAD_EVENTS = 65_536


class ChangeLog:
    """Counts every change of an index; keeps those that nobody has taken, unless they are too many.

    `groups` is the index itself, per group what is found under which digest; a reader that is too late gets all of it.
    """

    def __init__(self, groups: Sequence[Mapping[bytes, int]]) -> None:
        self.version = 0
        self._groups = groups
        self._runs: list[KvRun] = []
        self._taken = 0  # version up to which somebody has read
        self._num_unread = 0

    def add(self, action: Literal["added", "removed"], group: int, digests: Sequence[bytes]) -> None:
        """Note blocks of one group."""
        self._note(KvRun(action, group, tuple(digests)), len(digests))

    def take(self) -> KvUpdate | None:
        """Everything since the last call, the whole index if that is too much; None if nothing changed."""
        if self._taken == self.version:
            return None
        if self._num_unread > MAX_UNREAD_EVENTS:
            update = self.whole()
        else:
            update = KvUpdate(after=self._taken, version=self.version, runs=tuple(self._runs))
        self._runs = []
        self._num_unread = 0
        self._taken = self.version
        return update

    def whole(self) -> KvUpdate:
        """All that can be found now; takes nothing."""
        runs = tuple(KvRun("added", group, tuple(found)) for group, found in enumerate(self._groups))
        return KvUpdate(after=self.version, version=self.version, runs=runs, whole=True)

    def _note(self, run: KvRun, count: int) -> None:
        self.version += count
        self._num_unread += count
        if self._num_unread > MAX_UNREAD_EVENTS:
            self._runs = []
        else:
            self._runs.append(run)
