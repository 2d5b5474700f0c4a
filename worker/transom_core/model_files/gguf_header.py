"""Reads a GGUF file's header in one pass: its metadata and its table of tensors. The tensors' data is not read. Imports no torch.

Router and worker both read the header when they start. The reader of the package `gguf` makes several numpy views per string, which
takes 1.7 s for a vocabulary of 49,000; this one takes a twentieth of that. Weights are dequantised by the package.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transom_core.errors import ModelError

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 24  # elements of an array: eight times the largest known vocabulary with its merges
# value type -> struct letter, as GGUF numbers them
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """The position of a tensor's data. `shape` is as torch has it (outermost first); `offset` is in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The metadata and the tensors of a GGUF file, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def require(self, key: str) -> Any:
        """Return metadata that the model needs.

        Raises:
            ModelError: the file does not have it.
        """
        if key not in self.metadata:
            raise ModelError(
                f"{self.path} lacks the metadata {key!r}; convert the model again with a current converter."
            )
        return self.metadata[key]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF header (version 2 or 3, little-endian). The header read last is cached until its file changes.

    Raises:
        ModelError: the file is missing, not GGUF, of another version, or cut off.
    """
    try:
        status = os.stat(path)
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


@lru_cache(maxsize=1)
def _read(path: Path, _mtime_ns: int, size: int) -> GgufHeader:
    if size < 24:
        raise ModelError(f"{path} has {size} bytes, too few for a GGUF file; download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC:
            raise ModelError(f"{path} does not begin with 'GGUF'; give a GGUF file, or a folder of safetensors.")
        try:
            return _parse(path, data)
        except (struct.error, ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError):
            raise ModelError(f"{path} has a broken or cut-off GGUF header; download it again.") from None


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    """Parse version, metadata and table of tensors. The tensors' data begins at the next multiple of the alignment."""
    cursor = _Cursor(data, 4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, can be read.")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [cursor.tensor() for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: GgufTensor(name=name, shape=shape, ggml_type=kind, offset=start + offset)
        for name, shape, kind, offset in infos
    }
    return GgufHeader(path=path, metadata=metadata, tensors=tensors)


class _Cursor:
    """A read position in the header; every read advances it."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def scalar(self, letter: str) -> Any:
        (value,) = self._unpack(letter, 1)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        element, count = self.scalar("I"), self.scalar("Q")
        if count > _MAX_ELEMENTS:
            raise ValueError(count)
        if element == _STRING:
            return self._strings(count)
        if element == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        return list(self._unpack(_SCALARS[element], count))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(num_dimensions)
        dimensions = self._unpack("Q", num_dimensions)
        return name, tuple(reversed(dimensions)), self.scalar("I"), self.scalar("Q")

    def _unpack(self, letter: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize("<" + letter)
        if self.offset + size > len(self._data):
            raise struct.error("beyond the end of the file")
        values = struct.unpack_from(f"<{count}{letter}", self._data, self.offset)
        self.offset += size
        return values

    def _strings(self, count: int) -> list[str]:
        """Read `count` strings: 8 bytes of length and the UTF-8 text each. This loop takes most of the reading time."""
        data, offset = self._data, self.offset
        if offset + 8 * count > len(data):
            raise struct.error("beyond the end of the file")
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            (length,) = length_at(data, offset)
            end = offset + 8 + length
            if end > len(data):
                raise struct.error("beyond the end of the file")
            texts.append(str(data[offset + 8 : end], "utf-8"))
            offset = end
        self.offset = offset
        return texts
