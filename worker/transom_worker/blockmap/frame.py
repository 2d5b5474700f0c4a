"""One frame as bytes: a JSON header, then arrays of little-endian 32-bit numbers; see docs/block_map.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


class Frame(NamedTuple):
    """A frame without its number, which differs from watcher to watcher: all after it in the header, and the arrays."""

    header: bytes
    arrays: bytes

    def numbered(self, sequence: int) -> bytes:
        """The frame as it is sent."""
        header = b'{"sequence":%d,' % sequence + self.header
        return b"".join((len(header).to_bytes(4, "little"), header, bytes(-len(header) % 4), self.arrays))


def make_frame(header: Mapping[str, Any], arrays: Mapping[str, Words]) -> Frame:
    """Put a frame together; `header` has neither `sequence` nor `arrays`."""
    named = [[name, int(words.size)] for name, words in arrays.items()]
    text = json.dumps({**header, "arrays": named}, separators=(",", ":"), ensure_ascii=False)
    data = b"".join(np.ascontiguousarray(words, dtype="<u4").tobytes() for words in arrays.values())
    return Frame(text.encode()[1:], data)
