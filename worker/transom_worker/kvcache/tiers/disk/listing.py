"""`FolderListing`: which blocks have files in a rank's folder, found by listing the subfolders that have changed.

A folder has up to 256 subfolders, one for each first byte of a digest. A subfolder's time of change tells whether any process has
added or removed files; a subfolder whose time is unchanged is not listed again. A call of `look` is a *round*: it reads about
`MOST_FILES` names and then stops, and the next round continues there. So the cost of a round is bounded, however many files come
and go. Example: with 300,000 files, if every subfolder changes, a round lists 17 subfolders with 20,000 files, and 15 rounds list
all.

Times of change are coarse: after a listing, a file may still be added in the same tick of the file system's clock. So a subfolder
that was listed because its time had changed is listed once more in a later round.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from transom_worker.kvcache.tiers.disk.owned_directory import OwnedDirectory
from transom_worker.kvcache.tiers.disk.space import BLOCK_FILE

MOST_FILES = 20_000  # a round ends after the subfolder with which it has read this many names

BlockKey = tuple[int, bytes]  # a block's group and digest


class ListedChanges(NamedTuple):
    """Blocks whose files were added and removed since the last round."""

    added: list[BlockKey]
    removed: list[BlockKey]


@dataclass(slots=True)
class _Subfolder:
    """What is known of one subfolder."""

    blocks: set[BlockKey] = field(default_factory=set)  # as listed last
    changed_ns: int = -1  # the time of change before that listing; -1: not listed
    is_settled: bool = False  # it was listed twice with this time of change


class FolderListing:
    """Finds the block files of one folder, and remembers what it has found. Not thread-safe."""

    def __init__(self, folder: OwnedDirectory) -> None:
        self._folder = folder
        self._subfolders: dict[str, _Subfolder] = {}
        self._next = ""  # the name of the subfolder at which the next round begins

    def look(self, *, most_files: int = MOST_FILES) -> ListedChanges:
        """Make a round: list the subfolders that have changed, as many as `most_files` names allow, and at least one."""
        changes = ListedChanges([], [])
        num_files = 0
        # Known subfolders too, even if they are gone: their blocks must be reported as removed.
        names = sorted(self._subfolders.keys() | _list(self._folder))
        for name in [*(one for one in names if one >= self._next), *(one for one in names if one < self._next)]:
            if num_files >= most_files:
                self._next = name
                return changes
            num_files += self._look_into(name, changes)
        return changes

    def look_at_all(self) -> ListedChanges:
        """List every subfolder that has changed, however many names they have."""
        self._next = ""
        return self.look(most_files=1 << 62)

    def forget(self, blocks: Iterable[BlockKey]) -> None:
        """Forget that these blocks have files; the next rounds report those that do as added."""
        for group, digest in blocks:
            subfolder = self._subfolders.get(digest.hex()[:2])
            if subfolder is not None:
                subfolder.blocks.discard((group, digest))
                subfolder.changed_ns = -1

    def _look_into(self, name: str, changes: ListedChanges) -> int:
        """List a subfolder if it may have changed, add what is new to `changes`, and return how many names were read."""
        known = self._subfolders.setdefault(name, _Subfolder())
        try:
            changed_ns = os.stat(name, dir_fd=self._folder.descriptor, follow_symlinks=False).st_mtime_ns
        except OSError:
            changed_ns = -1  # the subfolder is gone or cannot be read, and so are its files
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
    """Return the names of a subfolder's files, without folders and links; none if the subfolder cannot be read."""
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
