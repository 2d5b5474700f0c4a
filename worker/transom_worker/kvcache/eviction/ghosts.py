"""Remembers evicted nodes of the prefix tree, by digest, in compact arrays of 23 bytes for each ghost.

A *ghost* is a digest from an evicted node's segment, with what was known of the node: its boundary, its segment's length, and the
class and number of its watch (`return_times`). Only the first 8 bytes of a digest are kept: two of so few ghosts practically never
agree in them, and if they did, only a count would be wrong.

The ghosts are stored like the lines of an 8-way set-associative cache. The digest chooses the set:

    set 0  | place 0 | place 1 | ... | place 7 |      place: 8 bytes of digest, class + 1 (0: empty), watch, boundary, length
    set 1  | ...

In a full set a new ghost replaces the oldest one. So ghosts are forgotten nearly in the order in which they came. The arrays hold
plain numbers, so the garbage collector has no objects to visit.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

MAX_GHOSTS = 262_144  # 5.8 MiB
PLACES = 8  # of a set
MAX_LENGTH = 2**16 - 1  # of a segment, in hash blocks, so that it fits into two bytes
KEY_BYTES = 8  # of a digest


class Ghost(NamedTuple):
    """What is remembered about one evicted node: its watch's number, its class, its boundary in hash blocks, and the hash blocks of
    its segment (at most `MAX_LENGTH`)."""

    watch: int
    class_id: int
    boundary: int
    num_segment_blocks: int = 1


class Ghosts:
    """Up to `capacity` ghosts by digest. The arrays are allocated with the first ghost."""

    def __init__(self, capacity: int = MAX_GHOSTS) -> None:
        self._num_sets = max(1, capacity // PLACES)  # a table without sets could not remember anything
        self._keys = bytearray()
        self._classes = bytearray()  # class + 1
        self._watches = array("Q")
        self._boundaries = array("I")
        self._lengths = array("H")
        self._oldest = bytearray()  # by set: the place whose ghost is the oldest, once the set has been full
        self._num_ghosts = 0

    def __len__(self) -> int:
        return self._num_ghosts

    def __contains__(self, digest: bytes) -> bool:
        return bool(self._num_ghosts) and self._find(digest, self._set_of(digest)) is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        flat = len(self._keys) + len(self._classes) + len(self._oldest)
        return flat + sum(len(one) * one.itemsize for one in (self._watches, self._boundaries, self._lengths))

    def remember(self, digest: bytes, ghost: Ghost) -> None:
        """Remember a ghost. It replaces the ghost with the same digest, or else the oldest one of a full set."""
        if not self._keys:
            self._allocate()
        begin = self._set_of(digest)
        at = self._find(digest, begin)
        if at is None:
            at = self._classes.find(0, begin, begin + PLACES)
            if at >= 0:
                self._num_ghosts += 1
            else:
                which = begin // PLACES
                at = begin + self._oldest[which]
                self._oldest[which] = (self._oldest[which] + 1) % PLACES
            self._keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] = digest[:KEY_BYTES]
        self._watches[at], self._classes[at] = ghost.watch, ghost.class_id + 1
        self._boundaries[at], self._lengths[at] = ghost.boundary, min(MAX_LENGTH, ghost.num_segment_blocks)

    def pop(self, digest: bytes) -> Ghost | None:
        """Return the ghost of this digest and forget it; None if there is none."""
        if not self._num_ghosts:
            return None
        at = self._find(digest, self._set_of(digest))
        if at is None:
            return None
        ghost = Ghost(self._watches[at], self._classes[at] - 1, self._boundaries[at], self._lengths[at])
        self._classes[at] = 0
        self._num_ghosts -= 1
        return ghost

    def _allocate(self) -> None:
        num_places = self._num_sets * PLACES
        self._keys, self._classes = bytearray(num_places * KEY_BYTES), bytearray(num_places)
        self._watches = array("Q", [0]) * num_places
        self._boundaries, self._lengths = array("I", [0]) * num_places, array("H", [0]) * num_places
        self._oldest = bytearray(self._num_sets)

    def _set_of(self, digest: bytes) -> int:
        """Return the first place of a digest's set; the digest's last bytes choose it, and its first ones are the key."""
        return int.from_bytes(digest[-4:], "little") % self._num_sets * PLACES

    def _find(self, digest: bytes, begin: int) -> int | None:
        """Return the place of a digest in the set that begins at `begin`; None if the set lacks it."""
        found = self._keys.find(digest[:KEY_BYTES], begin * KEY_BYTES, (begin + PLACES) * KEY_BYTES)
        # A match that does not begin at a place (`offset`) spans two keys, and a place with class 0 is empty: neither counts.
        at, offset = divmod(found, KEY_BYTES)
        return at if found >= 0 and not offset and self._classes[at] else None
