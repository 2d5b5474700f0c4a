"""Computes a digest of the contents of a model's files: equal digests mean equal weights, config and tokenizer.

Names, sizes and times do not tell two models apart: a fine-tune has the shapes of its base, copies and archives may keep times, and
a blob in the Hugging Face cache keeps its name even if a program writes through the link. So every byte is read, on a few threads,
while the weights are loaded: loading needs the same pages of the page cache. The files are cut into *pieces*, and the ranks on one
host divide them: the rank with index `i mod ranks on the host` reads piece `i`. So every host reads all of its copy, and hosts
with different weights are found. The digest is the same for any number of ranks:

    reading = ContentReading(files, index=0, count=2)        the threads run
    ... load the weights ...
    part = reading.finish()                                  this rank's pieces; no file may have changed since
    digest = join_parts([part, part of the other rank])
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from transom_core.errors import ModelError
from transom_core.model_files.resolve import ModelFiles
from transom_core.model_files.text_files import MODELOPT_FILE, weight_files

PIECE_BYTES = 16 << 20
MAX_THREADS = 8  # one reads about 1 GB/s
_BUFFER_BYTES = 1 << 20
# These decide how weights are read, which text an id stands for, and which id ends a text.
_SMALL_FILES = (MODELOPT_FILE, "tokenizer.json", "tokenizer_config.json", "tekken.json", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class ContentPart:
    """One rank's part of the contents: the list of all files, and the digests of the pieces `index`, `index + count` and so on."""

    files: bytes
    digests: tuple[bytes, ...]
    index: int = 0
    count: int = 1


class ContentReading:
    """Reads the files of a model on threads of its own from its construction on; `finish` returns the result."""

    def __init__(self, files: ModelFiles, *, index: int = 0, count: int = 1) -> None:
        """Begin to read the share with this index of `count` ranks that read the same files on one host.

        Raises:
            ModelError: a file cannot be read.
        """
        self._index, self._count = index, count
        self._paths = [files.path] if files.is_gguf else _files_of(files.path)
        self._before = [_status(path) for path in self._paths]
        listed = [
            (path.name if not files.is_gguf else "", size)
            for path, (size, *_) in zip(self._paths, self._before, strict=True)
        ]
        self._files = json.dumps([files.config, files.generation_config, listed], sort_keys=True).encode()
        pieces = [
            (path, start)
            for path, (size, *_) in zip(self._paths, self._before, strict=True)
            for start in range(0, size, PIECE_BYTES)
        ]
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="transom-contents")
        self._digests: list[Future[bytes]] = [self._threads.submit(_digest, *piece) for piece in pieces[index::count]]

    def finish(self) -> ContentPart:
        """Wait for the digests of this rank's pieces, and return them.

        Raises:
            ModelError: a file cannot be read, or has changed meanwhile, so that the loaded weights may be of two models.
        """
        self._threads.shutdown(wait=True)
        for path, before in zip(self._paths, self._before, strict=True):
            if _status(path) != before:
                raise ModelError(f"{path} changed while the model was loaded; start again when it is complete.")
        digests = tuple(digest.result() for digest in self._digests)
        return ContentPart(self._files, digests, self._index, self._count)

    def cancel(self) -> None:
        """Stop reading and end the threads, because the model could not be loaded."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def join_parts(parts: Sequence[ContentPart]) -> bytes:
    """Return the digest of the contents from the parts of all ranks: 32 bytes, or no bytes if there are no parts.

    The ranks of each host must have all pieces between them.

    Raises:
        ModelError: the ranks have different files.
    """
    if not parts:
        return b""
    pieces = {
        (part.index + position * part.count, digest) for part in parts for position, digest in enumerate(part.digests)
    }
    num_pieces = len({number for number, _ in pieces})
    if len({part.files for part in parts}) > 1 or len(pieces) > num_pieces:
        raise ModelError("The ranks found different files of the model on their hosts; copy the same model to each.")
    whole = sha256(sha256(parts[0].files).digest())
    for _, digest in sorted(pieces):
        whole.update(digest)
    return whole.digest()


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that decide what is computed, besides the configs, whose contents `ModelFiles` already has."""
    return [*weight_files(folder), *(path for name in _SMALL_FILES if (path := folder / name).exists())]


def _status(path: Path) -> tuple[int, int, int, int]:
    """Return a file's size, mtime, ctime and inode. A program can set a file's mtime back, but not its ctime."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _digest(path: Path, start: int) -> bytes:
    """Return the digest of the piece of a file that begins at byte `start`."""
    digest, buffer = sha256(), bytearray(_BUFFER_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = PIECE_BYTES
            while left and (count := file.readinto(memoryview(buffer)[: min(left, _BUFFER_BYTES)])):
                digest.update(memoryview(buffer)[:count])
                left -= count
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    return digest.digest()
