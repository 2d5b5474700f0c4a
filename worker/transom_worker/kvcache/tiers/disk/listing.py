"""`FolderListing`: which blocks have files in a rank's folder, found by listing the subfolders that have changed.

A folder has up to 256 subfolders. The time of change of a subfolder tells whether files came or went, by whichever process; those
that stayed as they were are not listed again. A round reads about `MOST_FILES` names and then stops, so a round
costs about as much however many files come and go; the next one continues where it stopped. For example, of 300,000 files in
all of which every subfolder changes, a round lists 17 subfolders with 20,000 files, and 15 rounds see everything.

Times of change are coarse: a file may come after a listing in the same tick of the file system's clock. So a subfolder that was
listed because it had changed is listed once more in a later round.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from transom_worker.kvcache.tiers.disk.owned_directory import OwnedDirectory
from transom_worker.kvcache.tiers.disk.space import BLOCK_FILE

MOST_FILES = 20_000  # names that a round reads, or those of one subfolder, if it has more

BlockKey = tuple[int, bytes]  # a block's group and digest


class ListedChanges(NamedTuple):
    """Blocks whose files came and went since the last round."""

    added: list[BlockKey]
    removed: list[BlockKey]


@dataclass(slots=True)
class _Subfolder:
    blocks: set[BlockKey] = field(default_factory=set)  # as listed last
    changed_ns: int = -1  # the time of change before that listing; -1: not listed
    is_settled: bool = False  # it was listed twice with this time of change


class FolderListing:
    """What was found in one folder of block files so far. Not thread-safe."""

    def __init__(self, folder: OwnedDirectory) -> None:
        self._folder = folder
        self._subfolders: dict[str, _Subfolder] = {}
        self._next = ""  # the name of the subfolder at which the next round begins

    def look(self, *, most_files: int = MOST_FILES) -> ListedChanges:
        """Make a round: list the subfolders that have changed, as many as `most_files` names allow, and at least one."""
        changes = ListedChanges([], [])
        num_files = 0
        names = sorted(self._subfolders.keys() | _list(self._folder))
        for name in [*(one for one in names if one >= self._next), *(one for one in names if one < self._next)]:
            if num_files >= most_files:
                self._next = name
                return changes
            num_files += self._look_into(name, changes)
        return changes

    def look_at_all(self) -> ListedChanges:
        """List every subfolder that has changed, however many names that are."""
        self._next = ""
        return self.look(most_files=1 << 62)

    def forget(self, blocks: Iterable[BlockKey]) -> None:
        """Take these blocks as unknown: those that have files are found anew."""
        for group, digest in blocks:
            subfolder = self._subfolders.get(digest.hex()[:2])
            if subfolder is not None:
                subfolder.blocks.discard((group, digest))
                subfolder.changed_ns = -1

    def _look_into(self, name: str, changes: ListedChanges) -> int:
        """List a subfolder if it may have changed, and return how many names it has then."""
        known = self._subfolders.setdefault(name, _Subfolder())
        try:
            changed_ns = os.stat(name, dir_fd=self._folder.descriptor, follow_symlinks=False).st_mtime_ns
        except OSError:
            changed_ns = -1  # it is gone, or cannot be read: nothing in it can be
        if changed_ns == known.changed_ns and known.is_settled:
            return 0
        known.is_settled = changed_ns == known.changed_ns
        known.changed_ns = changed_ns
        files = _files(self._folder, name)
        blocks = {_key(file) for file in files if BLOCK_FILE.fullmatch(file)}
        changes.added.extend(blocks - known.blocks)
        changes.removed.extend(known.blocks - blocks)
        known.blocks = blocks
        return len(files)


def _list(folder: OwnedDirectory) -> list[str]:
    """Return the names in a folder; none if it cannot be read."""
    try:
        descriptor = folder.reopen()
    except OSError:
        return []
    try:
        return os.listdir(descriptor)
    except OSError:
        return []
    finally:
        os.close(descriptor)


def _files(folder: OwnedDirectory, name: str) -> list[str]:
    """Return the names of a subfolder's files; none if it cannot be read. Folders and links are no files of blocks."""
    try:
        descriptor = folder.reopen(name)
    except OSError:
        return []
    try:
        with os.scandir(descriptor) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []
    finally:
        os.close(descriptor)


def _key(file: str) -> BlockKey:
    """Return the block of a file's name, as `BlockFolder` makes it: 64 hexadecimal digits, "-", the group, ".kv"."""
    return int(file[65:-3]), bytes.fromhex(file[:64])
