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
class and number of its watch, each at the digest's place (`digest_table`).
"""

from array import array
from typing import NamedTuple

from transom_worker.kvcache.prefix.digest_table import DigestTable

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
MAX_LENGTH = 2**16 - 1  # of a segment, in hash blocks, so that it fits into two bytes


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
        self._digests = DigestTable(capacity)
        self._classes = bytearray()
        self._watches = array("Q")
        self._boundaries = array("I")
        self._lengths = array("H")

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self._watches, self._boundaries, self._lengths)
        return self._digests.num_bytes + len(self._classes) + sum(len(one) * one.itemsize for one in arrays)

    def remember(self, digest: bytes, ghost: Ghost) -> None:
        """Remember a ghost. It replaces the ghost with the same digest, or else the oldest one of a full set."""
        if not self._classes:
            num_places = self._digests.num_places
            self._classes, self._watches = bytearray(num_places), array("Q", [0]) * num_places
            self._boundaries, self._lengths = array("I", [0]) * num_places, array("H", [0]) * num_places
        at = self._digests.take(digest)
        self._watches[at], self._classes[at] = ghost.watch, ghost.class_id
        self._boundaries[at], self._lengths[at] = ghost.boundary, min(MAX_LENGTH, ghost.num_segment_blocks)

    def pop(self, digest: bytes) -> Ghost | None:
        """Return the ghost of this digest and forget it; None if there is none."""
        if (at := self._digests.find(digest)) is None:
            return None
        self._digests.give_up(at)
        return Ghost(self._watches[at], self._classes[at], self._boundaries[at], self._lengths[at])
