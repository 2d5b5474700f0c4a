"""Packs one KV block as a file: a header that identifies it, a checksum over everything, and the block's contents.

    bytes 0 to 8        magic number and version of the format
    8 to 40             fingerprint of the model and the rank's layout (`disk_fingerprint`)
    40 to 72            digest of the block's tokens and all before them, with the tenant's salt (`kv_cache.hashing`)
    72 to 76            KV cache group
    76 to 84            length of the contents
    84 to 116           BLAKE2b of bytes 0 to 84 and the contents
    from 116 on         the contents

A file that is cut short, too long, changed, or has another block counts as broken: its contents are never used.
"""

from __future__ import annotations

import os
import struct
from hashlib import blake2b
from io import FileIO
from typing import NamedTuple

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
