"""`DiskIndex`: the digests of the blocks that have files in the disk tier, as the last listing of the folder found them.

Files come and go without the cache's knowledge, since other workers on the host write and remove them too. So the index may be out
of date. If it names a file that is gone, the read fails and the prefix is computed. The index is part of the worker's prefix index:
routers receive its changes, so that their searches find what the worker's own searches find.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from transom_core.kv_cache.tiers import DISK
from transom_worker.kvcache.prefix.change_log import ChangeLog


class DiskIndex:
    """The digests with files: `groups[group]` is a dict used as an ordered set. Nothing may be added before `open`."""

    def __init__(self, num_groups: int) -> None:
        self.groups: tuple[dict[bytes, None], ...] = tuple({} for _ in range(num_groups))
        self._changes: ChangeLog | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a disk tier from which blocks are read."""
        return self._changes is not None

    def open(self, changes: ChangeLog) -> None:
        """From now on record in `changes` what is added and removed.

        `changes` numbers tiers in the order in which it gets them, so it must have those of device and host already.
        """
        self._changes = changes
        changes.add_tier(self.groups)

    @property
    def num_blocks(self) -> int:
        """The number of blocks, of all groups, that have files."""
        return sum(map(len, self.groups))

    def add(self, group: int, digests: Iterable[bytes]) -> None:
        """Note that these blocks have files."""
        found = self.groups[group]
        new = [digest for digest in dict.fromkeys(digests) if digest not in found]
        found.update(dict.fromkeys(new))
        self._note("added", group, new)

    def remove(self, group: int, digests: Iterable[bytes]) -> None:
        """Note that these blocks have no files."""
        found = self.groups[group]
        gone = [digest for digest in dict.fromkeys(digests) if digest in found]
        for digest in gone:
            del found[digest]
        self._note("removed", group, gone)

    def _note(self, action: Literal["added", "removed"], group: int, digests: list[bytes]) -> None:
        if digests and self._changes is not None:
            self._changes.add(action, DISK, group, digests)
