"""The fingerprint of a model and a layout: files of blocks with equal fingerprints have interchangeable contents.

It covers the format's version, the model's files, everything that decides the numbers in a block (dtype, quantisation of the
weights, the model's settings, kind of device), and what lies where in a rank's blocks. Of a file of weights it covers name, size,
time of the last change, and 16 pieces of the contents; reading all of them would take as long as loading the model. Smaller files
count whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

VERSION = b"transom-disk-1"
WHOLE_BYTES = 1 << 20  # a file up to this size counts whole
NUM_PIECES = 16
PIECE_BYTES = 4096


def fingerprint(files: Iterable[Path], *facts: object) -> bytes:
    """Return 32 bytes for these files of a model and these facts, whose `repr` must be the same in every process.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake2b(VERSION, digest_size=32)
    for fact in facts:
        _add(digest, repr(fact).encode())
    for path in sorted(files, key=lambda path: path.name):
        _add(digest, path.name.encode())
        _add_file(digest, path)
    return digest.digest()


def _add(digest: blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little") + part)


def _add_file(digest: blake2b, path: Path) -> None:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size <= WHOLE_BYTES:
            _add(digest, file.read())
            return
        _add(digest, f"{status.st_size} {status.st_mtime_ns}".encode())
        for piece in range(NUM_PIECES):
            file.seek((status.st_size - PIECE_BYTES) * piece // (NUM_PIECES - 1))
            _add(digest, file.read(PIECE_BYTES))
