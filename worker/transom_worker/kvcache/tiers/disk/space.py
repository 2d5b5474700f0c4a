"""`DiskSpace`: the space that the files of all processes of a host share, and which files leave it first.

A process reserves space before it writes. A file beside the blocks has the number of bytes in use; it is changed under a lock, so
that the processes together stay within the space. When it is full, the process that notices looks at all files, counts them anew,
and removes those that were not used for longest (reading a block sets its file's time) until an eighth of the space is free.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from transom_worker.kvcache.tiers.disk.owned_directory import OwnedDirectory

BLOCK_FILE = re.compile(r"[0-9a-f]{64}-\d+\.kv")
UNFINISHED_FILE = re.compile(r"\.[0-9a-f]{64}-\d+\..*\.tmp")
UNFINISHED_S = 600.0  # a file that is not finished after this time was left by a process that ended
FREE_SHARE = 8  # an eviction frees one part in this many
_COUNT_BYTES = 20


class _File(NamedTuple):
    used_s: float
    num_bytes: int
    path: str  # from the root on


class DiskSpace:
    """The space below `root`, `limit_bytes` large. Any thread of any process may use it."""

    def __init__(self, root: OwnedDirectory, limit_bytes: int) -> None:
        self._root, self._limit_bytes = root, limit_bytes
        self.num_evicted = 0  # files, by this process

    def reserve(self, num_bytes: int) -> bool:
        """Count `num_bytes` more in use, and remove old files if that is too much. False if the space is smaller than that.

        Raises:
            OSError: the count cannot be kept.
        """
        if num_bytes > self._limit_bytes:
            return False
        with self._locked() as count:
            used = _read(count) + num_bytes
            if used > self._limit_bytes:
                used = self._make_room(num_bytes) + num_bytes
            _write(count, used)
        return True

    def release(self, num_bytes: int) -> None:
        """Count `num_bytes` less in use. Raises OSError."""
        with self._locked() as count:
            _write(count, max(0, _read(count) - num_bytes))

    def recount(self) -> int:
        """Count the files that there are, remove what processes left unfinished, and return the bytes in use. Raises OSError."""
        with self._locked() as count:
            used = self._make_room(0)
            _write(count, used)
        return used

    @property
    def used_bytes(self) -> int:
        """The bytes in use, as counted. Raises OSError."""
        with self._locked() as count:
            return _read(count)

    def _make_room(self, num_bytes: int) -> int:
        """Remove the files that were not used for longest until `num_bytes` more fit, and return the bytes that stay."""
        files = sorted(self._files())
        used = sum(file.num_bytes for file in files)
        if used + num_bytes <= self._limit_bytes:
            return used
        most = max(0, min(self._limit_bytes - num_bytes, self._limit_bytes - self._limit_bytes // FREE_SHARE))
        for file in files:
            if used <= most:
                break
            with suppress(FileNotFoundError):
                os.unlink(file.path, dir_fd=self._root.descriptor)
                self.num_evicted += 1
            used -= file.num_bytes
        return used

    def _files(self) -> Iterator[_File]:
        """Yield the block files of all models and ranks; anything else below the root is left alone."""
        now_s = time.time()
        for folder, _, names, descriptor in os.fwalk(dir_fd=self._root.descriptor):
            for name in names:
                with suppress(FileNotFoundError):
                    if BLOCK_FILE.fullmatch(name):
                        status = os.lstat(name, dir_fd=descriptor)
                        yield _File(status.st_mtime, status.st_size, os.path.join(folder, name))
                    elif UNFINISHED_FILE.fullmatch(name) and _age_s(name, descriptor, now_s) > UNFINISHED_S:
                        os.unlink(name, dir_fd=descriptor)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file of the count, locked: each opening has a lock of its own, so threads of one process exclude each other, too."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open("bytes_in_use", flags, 0o600, dir_fd=self._root.descriptor)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


def _age_s(name: str, descriptor: int, now_s: float) -> float:
    return now_s - os.lstat(name, dir_fd=descriptor).st_mtime


def _read(file: int) -> int:
    text = os.pread(file, _COUNT_BYTES, 0).strip()
    return int(text) if text.isdigit() else 0


def _write(file: int, count: int) -> None:
    os.pwrite(file, b"%*d" % (_COUNT_BYTES, count), 0)
