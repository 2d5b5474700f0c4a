"""`BlockFolder`: the files of one rank's blocks of one model, readable by their owner alone.

    DIR/transom-kv/bytes_in_use                    the count of the space that all processes share
    DIR/transom-kv/<fingerprint>/ab/ab12...-0.kv   the block of group 0 under the digest ab12...

Files appear whole: they are written under another name and then renamed. Two processes that write the same block write the same
bytes.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transom_core.errors import ConfigError
from transom_worker.kvcache.tiers.disk.block_file import HEADER_BYTES, BlockName, BrokenFile, pack, read_block
from transom_worker.kvcache.tiers.disk.listing import FolderListing
from transom_worker.kvcache.tiers.disk.space import DiskSpace

_OWNER_ONLY = 0o700


@dataclass(slots=True)
class FileCounts:
    """What became of files, since the start of the process."""

    num_written: int = 0
    num_read: int = 0
    num_missing: int = 0
    num_broken: int = 0


class BlockFolder:
    """The blocks of one fingerprint. Any thread may use it."""

    def __init__(self, directory: Path, fingerprint: bytes, *, space_bytes: int) -> None:
        """Make the folder if need be.

        Raises:
            ConfigError: the directory cannot be used, or belongs to another user.
        """
        self.fingerprint = fingerprint
        root = directory / "transom-kv"
        self._path = root / fingerprint.hex()[:32]
        self.space = DiskSpace(root, space_bytes)
        self.counts = FileCounts()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for folder in (root, self._path):
                folder.mkdir(mode=_OWNER_ONLY, exist_ok=True)
                if folder.stat().st_uid != os.geteuid():
                    raise ConfigError(
                        f"--disk-cache {directory}: {folder} belongs to another user; give another directory."
                    )
                folder.chmod(_OWNER_ONLY)
            self.space.recount()
        except OSError as error:
            raise ConfigError(
                f"--disk-cache {directory} cannot be used: {error}. Give a directory that can be written."
            ) from error

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether there is a file for the block; only reading it tells whether it is whole."""
        return os.path.exists(self._file(group, digest))

    def new_listing(self) -> FolderListing:
        """Return what finds out which blocks have files; it has found none yet."""
        return FolderListing(self._path)

    def read(self, group: int, digest: bytes, num_bytes: int) -> bytes | None:
        """Return the contents of a block of `num_bytes`; None if there is no file, or a broken one, which is removed."""
        path = self._file(group, digest)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            self.counts.num_missing += 1
            return None
        except OSError:
            self._remove_broken(path)
            return None
        try:
            contents = read_block(file, BlockName(self.fingerprint, digest, group), num_bytes)
        except (BrokenFile, OSError):
            self._remove_broken(path)
            return None
        finally:
            os.close(file)
        with suppress(OSError):
            os.utime(path)
        self.counts.num_read += 1
        return contents

    def write(self, group: int, digest: bytes, contents: bytes | memoryview) -> bool:
        """Write a block, unless there is a file for it; return whether one is there now.

        Raises:
            OSError: the file cannot be written; nothing of it is left.
        """
        path = self._file(group, digest)
        with suppress(FileNotFoundError):
            os.utime(path)
            return True
        num_bytes = HEADER_BYTES + len(contents)
        if not self.space.reserve(num_bytes):
            return False
        unfinished = path.with_name(f".{path.stem}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(mode=_OWNER_ONLY, exist_ok=True)
            _write_file(unfinished, pack(BlockName(self.fingerprint, digest, group), contents))
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            with suppress(OSError):
                self.space.release(num_bytes)
            raise
        self.counts.num_written += 1
        return True

    def _file(self, group: int, digest: bytes) -> Path:
        name = digest.hex()
        return self._path / name[:2] / f"{name}-{group}.kv"

    def _remove_broken(self, path: Path) -> None:
        """Remove a file that is not the block that it should be. It has the name of one of our files, so nothing else is lost."""
        self.counts.num_broken += 1
        with suppress(OSError):
            num_bytes = os.lstat(path).st_size
            os.unlink(path)
            self.space.release(num_bytes)


def _write_file(path: Path, parts: tuple[bytes, bytes | memoryview]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(file, left) :]
    finally:
        os.close(file)
