"""`BlockFolder`: reads and writes the files of one rank's blocks of one model; only their owner can read them.

    DIR/transom-kv/bytes_in_use                    how many bytes the files of all processes of this host use (`space`)
    DIR/transom-kv/<fingerprint>/ab/ab12...-0.kv   the block of group 0 under the digest ab12...

A *fingerprint* is a hash of the model and the rank's layout: blocks with equal fingerprints have the same format. A file's time of
change is the time at which it was last used: `read` and `write` set it, and `space` removes the oldest files first.

Files appear whole: they are written under another name and then renamed. Two processes that write the same block write the same
bytes. Only files of this process's user are read, below directories that were opened once (`owned_directory`).

A file has a header that identifies the block, a checksum over everything, and the block's contents:

    bytes 0 to 8        magic number and version of the format
    8 to 40             fingerprint of the model and the rank's layout (`disk_fingerprint`)
    40 to 72            digest of the block's tokens and all before them, with the tenant's salt (`kv_cache.hashing`)
    72 to 76            KV cache group
    76 to 84            length of the contents
    84 to 116           BLAKE2b of bytes 0 to 84 and the contents
    from 116 on         the contents

A file that is cut short, too long, changed, or has another block counts as broken: its contents are never used.
"""

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from transom_core.errors import ConfigError
from transom_worker.kvcache.tiers.disk.listing import FolderListing
from transom_worker.kvcache.tiers.disk.owned_directory import open_directory
from transom_worker.kvcache.tiers.disk.space import DiskSpace

_MAGIC = b"TRNSMKV1"
_HEADER = struct.Struct("<8s32s32sIQ")
_CHECKSUM_BYTES = 32
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES


class BlockName(NamedTuple):
    """What identifies the block in a file: the model and layout, the tokens, and the KV cache group."""

    fingerprint: bytes  # 32 bytes
    digest: bytes  # 32 bytes
    group: int


class BrokenFile(Exception):
    """A file does not contain the block that its name promises."""


def pack(name: BlockName, contents: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """Return the two parts of a block's file: header (with the checksum) and contents."""
    header = _HEADER.pack(_MAGIC, name.fingerprint, name.digest, name.group, len(contents))
    return header + _checksum(header, contents), contents


def read_block(file: int, name: BlockName, num_bytes: int) -> bytes:
    """Return the contents of a block of `num_bytes` from an open file.

    Raises:
        BrokenFile: the file does not contain exactly that block.  OSError: it cannot be read.
    """
    size = os.fstat(file).st_size
    if size != HEADER_BYTES + num_bytes:
        raise BrokenFile(f"it has {size} bytes, not {HEADER_BYTES + num_bytes}")
    return unpack(FileIO(file, closefd=False).readall(), name, num_bytes)


def unpack(data: bytes, name: BlockName, num_bytes: int) -> bytes:
    """Return the contents of a block of `num_bytes` from the bytes of a file. Raises BrokenFile, as `read_block`."""
    if len(data) != HEADER_BYTES + num_bytes:
        raise BrokenFile(f"it has {len(data)} bytes, not {HEADER_BYTES + num_bytes}")
    header, checksum, contents = data[: _HEADER.size], data[_HEADER.size : HEADER_BYTES], data[HEADER_BYTES:]
    if header != _HEADER.pack(_MAGIC, name.fingerprint, name.digest, name.group, num_bytes):
        raise BrokenFile("its header is of another block, model, layout or version")
    if checksum != _checksum(header, contents):
        raise BrokenFile("its checksum is wrong")
    return contents


def _checksum(header: bytes, contents: bytes | memoryview) -> bytes:
    digest = blake2b(header, digest_size=_CHECKSUM_BYTES)
    digest.update(contents)
    return digest.digest()


# O_NOFOLLOW refuses links, and O_NONBLOCK keeps `open` from waiting for a writer if the file is a pipe. O_EXCL refuses to open a
# file that exists already. O_CLOEXEC keeps child processes from inheriting the descriptors.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(slots=True)
class FileCounts:
    """How many files were written, read, missing or broken since the start of the process."""

    num_written: int = 0
    num_read: int = 0
    num_missing: int = 0
    num_broken: int = 0


class BlockFolder:
    """The files of the blocks with one fingerprint. Any thread may call its methods."""

    def __init__(self, directory: Path, fingerprint: bytes, *, space_bytes: int) -> None:
        """Open the folder of `fingerprint` below `directory`, and make it if it does not exist.

        Raises:
            ConfigError: the directory cannot be used, belongs to another user, or others may write into it.
        """
        self.fingerprint = fingerprint
        self.counts = FileCounts()
        try:
            root = open_directory(directory).enter("transom-kv")
            self._folder = root.enter(fingerprint.hex()[:32])
            self.space = DiskSpace(root, space_bytes)
            self.space.recount()
        except OSError as error:
            raise ConfigError(
                f"--disk-cache {directory} cannot be used: {error}. Give a directory, and no link, that this user alone can "
                "write."
            ) from error

    def new_listing(self) -> FolderListing:
        """Return a listing of the folder, which has found no blocks yet."""
        return FolderListing(self._folder)

    def read(self, group: int, digest: bytes, num_bytes: int) -> bytes | None:
        """Return the contents of a block of `num_bytes`; None if there is no file, or the file is broken. A broken file is removed.

        A file of another user counts as broken.
        """
        name, folder = _file(group, digest), self._folder.descriptor
        try:
            file = os.open(name, _READ, dir_fd=folder)
        except FileNotFoundError:
            self.counts.num_missing += 1
            return None
        except OSError:
            self._remove_broken(name)
            return None
        try:
            if os.fstat(file).st_uid != os.geteuid():
                raise BrokenFile("it belongs to another user")
            contents = read_block(file, BlockName(self.fingerprint, digest, group), num_bytes)
        except (BrokenFile, OSError):
            self._remove_broken(name)
            return None
        finally:
            os.close(file)
        with suppress(OSError):
            os.utime(name, dir_fd=folder, follow_symlinks=False)
        self.counts.num_read += 1
        return contents

    def write(self, group: int, digest: bytes, contents: bytes | memoryview) -> bool:
        """Write a block, unless it has a file already; return True. Return False if the space has no room for it beside what other
        processes write now.

        Raises:
            OSError: the file cannot be written; nothing of it is left.
        """
        name, folder = _file(group, digest), self._folder.descriptor
        with suppress(FileNotFoundError):  # if there is a file, note that it was used
            os.utime(name, dir_fd=folder, follow_symlinks=False)
            return True
        num_bytes, is_reserved = HEADER_BYTES + len(contents), False
        subfolder, _, last = name.partition("/")
        unfinished = f"{subfolder}/.{last.removesuffix('.kv')}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            self._folder.make(subfolder)
            with _new_file(unfinished, folder, num_bytes) as file:
                is_reserved = self.space.reserve(num_bytes)
                if is_reserved:
                    _write_all(file, pack(BlockName(self.fingerprint, digest, group), contents))
            if not is_reserved:
                os.unlink(unfinished, dir_fd=folder)
                return False
            os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=folder)
            if is_reserved:
                with suppress(OSError):
                    self.space.release(num_bytes)
            raise
        self.counts.num_written += 1
        return True

    def _remove_broken(self, name: str) -> None:
        """Remove a file that does not contain the block of its name. Only Transom uses such names, so no other data is lost."""
        self.counts.num_broken += 1
        with suppress(OSError):
            num_bytes = os.lstat(name, dir_fd=self._folder.descriptor).st_size
            os.unlink(name, dir_fd=self._folder.descriptor)
            self.space.release(num_bytes)


def _file(group: int, digest: bytes) -> str:
    """Return the path of a block's file, relative to the folder."""
    name = digest.hex()
    return f"{name[:2]}/{name}-{group}.kv"


@contextmanager
def _new_file(name: str, folder: int, num_bytes: int) -> Iterator[int]:
    """Make a file of zeros, and open it for writing while the context is open."""
    file = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        os.ftruncate(file, num_bytes)
        yield file
    finally:
        os.close(file)


def _write_all(file: int, parts: tuple[bytes, bytes | memoryview]) -> None:
    """Write a file's contents; `os.write` may write less than it is given, so it is called until nothing is left."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(file, left) :]
