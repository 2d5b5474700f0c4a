"""What the eviction policy remembers of checkpoints, in compact arrays, without objects for the garbage collector: `WatchRing`
holds the last watches, 10 bytes each, and `Ghosts` evicted nodes of the prefix tree by digest, 23 bytes each.

A *watch* follows one checkpoint (a node of the prefix tree) from its placement or last return until the next return
(`return_times`). Watches are numbered in the order in which they began, so their ages are in order too, and a ring holds them:

    number      first ...                       ... end - 1
    age         oldest                             youngest
    slot        number % capacity

If the ring is full, a new watch replaces the oldest one. The replaced watch counts neither as returned nor as survived, so no age
looks better or worse than it is; only less is learned about ages that few watches reach.

A *ghost* is a digest from an evicted node's segment, with what was known of the node: its boundary, its segment's length, and the
class and number of its watch. Only the first 8 bytes of a digest are kept: two of so few ghosts practically never agree in them,
and if they did, only a count would be wrong.

The ghosts are stored like the lines of an 8-way set-associative cache. The digest chooses the set:

    set 0  | place 0 | place 1 | ... | place 7 |      place: 8 bytes of digest, class + 1 (0: empty), watch, boundary, length
    set 1  | ...

In a full set a new ghost replaces the oldest one. So ghosts are forgotten nearly in the order in which they came.
"""

from array import array
from typing import NamedTuple

MAX_WATCHES = 2**20  # 10 MiB
_ENDED = 0x8000  # this bit of a class's 16 bits says that the watch has ended; so classes are below 32,768


class WatchRing:
    """Holds for each of the last `capacity` watches its class, when it began, and whether it has ended.

    A class is a number below 32,768; time is counted in admitted requests.
    """

    def __init__(self, capacity: int = MAX_WATCHES) -> None:
        self.first = 0  # number of the oldest watch in the ring
        self.end = 0  # number that the next watch gets
        self._capacity = capacity
        self._began = array("Q")
        self._class = array("H")

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return len(self._began) * (self._began.itemsize + self._class.itemsize)

    @property
    def is_full(self) -> bool:
        """Whether the next watch replaces the oldest one."""
        return self.end - self.first == self._capacity

    def begin(self, class_id: int, now: int) -> int:
        """Begin a watch and return its number; if the ring is full, it replaces the oldest watch."""
        number = self.end
        self.end += 1
        if number < self._capacity:
            self._began.append(now)
            self._class.append(class_id)
        else:
            self.first = number - self._capacity + 1
            self._began[number % self._capacity] = now
            self._class[number % self._capacity] = class_id
        return number

    def stop(self, number: int) -> bool:
        """End a watch; return False if it was replaced or had ended before."""
        if number < self.first or self._class[number % self._capacity] & _ENDED:
            return False
        self._class[number % self._capacity] |= _ENDED
        return True

    def began_at(self, number: int) -> int:
        """Return when a watch began; it must be in the ring."""
        return self._began[number % self._capacity]

    def class_of_running(self, number: int) -> int | None:
        """Return the class of a watch, which must be in the ring; None if it has ended."""
        class_id = self._class[number % self._capacity]
        return None if class_id & _ENDED else class_id


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
