"""`DiskSpace`: bounds the space that the block files of all processes of a host use together, and removes the oldest files.

A process makes an unfinished file of the block's full size, reserves its bytes, and writes it then. The file `bytes_in_use` has the
number of bytes in use; it is changed under a lock, so that the processes together stay within the space. When the space is full,
the process that notices this counts all files anew, unfinished ones, too, and removes those that were not used for longest (reading
a block sets its file's time) until an eighth of the space is free.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from transom_worker.kvcache.tiers.disk.owned_directory import OwnedDirectory

BLOCK_FILE = re.compile(r"[0-9a-f]{64}-\d+\.kv")
UNFINISHED_FILE = re.compile(r"\.[0-9a-f]{64}-\d+\..*\.tmp")
UNFINISHED_S = 600.0  # a file that is not finished after this time was left by a process that ended
FREE_SHARE = 8  # an eviction frees 1/8 of the space, so that not every write looks at all files
_COUNT_BYTES = 20  # digits of the count: enough for 2**64, so every count overwrites the one before


class _File(NamedTuple):
    is_finished: bool
    used_s: float
    num_bytes: int
    path: str  # relative to the root


class DiskSpace:
    """Counts the bytes of the files below `root`, at most `limit_bytes`. Any thread of any process may use it."""

    def __init__(self, root: OwnedDirectory, limit_bytes: int) -> None:
        self._root, self._limit_bytes = root, limit_bytes
        self.num_evicted = 0  # files, by this process

    def reserve(self, num_bytes: int) -> bool:
        """Count an unfinished file of `num_bytes` as used, and remove old files if that exceeds the limit; return True. Return
        False, and count nothing, if it does not fit beside other unfinished files.

        Raises:
            OSError: the file of the count cannot be read or written.
        """
        with self._locked() as count:
            used = _read(count) + num_bytes
            if used > self._limit_bytes:
                used = self._make_room()
            fits = used <= self._limit_bytes
            _write(count, used if fits else used - num_bytes)
        return fits

    def release(self, num_bytes: int) -> None:
        """Count `num_bytes` less as used. Raises OSError."""
        with self._locked() as count:
            _write(count, max(0, _read(count) - num_bytes))

    def recount(self) -> int:
        """Count the existing files anew, remove what processes left unfinished, and return the bytes in use. Raises OSError."""
        with self._locked() as count:
            used = self._make_room()
            _write(count, used)
        return used

    @property
    def used_bytes(self) -> int:
        """The bytes in use, as counted. Raises OSError."""
        with self._locked() as count:
            return _read(count)

    def _make_room(self) -> int:
        """Return the bytes that the files use; if they exceed the limit, first remove those that were not used for longest, unless
        the unfinished ones alone exceed it.

        Finished files are removed until all fit, and they leave 1/`FREE_SHARE` of the space. A first pass reads times and sizes
        only, and finds how old the files are that must go; a second one removes them. As objects, all files would take 300 bytes
        each.
        """
        times_s, sizes, unfinished_bytes = array("d"), array("q"), 0
        for file in self._files():
            if file.is_finished:
                times_s.append(file.used_s)
                sizes.append(file.num_bytes)
            else:
                unfinished_bytes += file.num_bytes
        finished_bytes = sum(sizes)
        if finished_bytes + unfinished_bytes <= self._limit_bytes or unfinished_bytes > self._limit_bytes:
            return finished_bytes + unfinished_bytes
        most = self._limit_bytes - max(unfinished_bytes, self._limit_bytes // FREE_SHARE)
        newest_s = _newest_to_remove(times_s, sizes, finished_bytes - most)
        for file in self._files():
            if finished_bytes <= most:
                break
            if not file.is_finished or file.used_s > newest_s:
                continue
            with suppress(FileNotFoundError):  # another process removed it as broken
                os.unlink(file.path, dir_fd=self._root.descriptor)
                self.num_evicted += 1
            finished_bytes -= file.num_bytes
        return finished_bytes + unfinished_bytes

    def _files(self) -> Iterator[_File]:
        """Yield the block files of all models and ranks, and unfinished ones; remove unfinished files that a process has left.
        Anything else below the root is left alone."""
        oldest_s = time.time() - UNFINISHED_S
        for folder, _, names, descriptor in os.fwalk(dir_fd=self._root.descriptor):
            for name in names:
                is_finished = BLOCK_FILE.fullmatch(name) is not None
                with suppress(FileNotFoundError):
                    if is_finished or UNFINISHED_FILE.fullmatch(name):
                        status = os.lstat(name, dir_fd=descriptor)
                        if is_finished or status.st_mtime >= oldest_s:
                            yield _File(is_finished, status.st_mtime, status.st_size, os.path.join(folder, name))
                        else:
                            os.unlink(name, dir_fd=descriptor)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Open the file of the count, and hold its lock while the context is open.

        `flock` locks belong to an opening of the file, not to a process, so threads of one process exclude each other, too.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open("bytes_in_use", flags, 0o600, dir_fd=self._root.descriptor)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def _newest_to_remove(times_s: array[float], sizes: array[int], num_bytes: int) -> float:
    """Return the time of the newest of the oldest files that together have `num_bytes` bytes."""
    for i in sorted(range(len(times_s)), key=times_s.__getitem__):
        num_bytes -= sizes[i]
        if num_bytes <= 0:
            return times_s[i]
    return float("inf")


def _read(file: int) -> int:
    """Return the count in a file; 0 if it is new or not a number."""
    text = os.pread(file, _COUNT_BYTES, 0).strip()
    return int(text) if text.isdigit() else 0


def _write(file: int, count: int) -> None:
    """Write a count in a fixed width, so that no digit of a longer one stays."""
    os.pwrite(file, b"%*d" % (_COUNT_BYTES, count), 0)
