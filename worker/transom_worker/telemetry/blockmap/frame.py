"""Encodes one frame as bytes: a JSON header, then arrays of little-endian 32-bit numbers. docs/block_map.md has the format."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


class Frame(NamedTuple):
    """A frame without its number, which differs by watcher: the header after the number, and the arrays."""

    header: bytes
    arrays: bytes

    def numbered(self, sequence: int) -> bytes:
        """Return the frame's bytes with the number `sequence`."""
        header = b'{"sequence":%d,' % sequence + self.header
        return b"".join((len(header).to_bytes(4, "little"), header, bytes(-len(header) % 4), self.arrays))


def make_frame(header: Mapping[str, Any], arrays: Mapping[str, Words]) -> Frame:
    """Make a frame of a header, without the fields `sequence` and `arrays`, and its arrays by name."""
    named = [[name, int(words.size)] for name, words in arrays.items()]
    text = json.dumps({**header, "arrays": named}, separators=(",", ":"), ensure_ascii=False)
    data = b"".join(np.ascontiguousarray(words, dtype="<u4").tobytes() for words in arrays.values())
    return Frame(text.encode()[1:], data)
