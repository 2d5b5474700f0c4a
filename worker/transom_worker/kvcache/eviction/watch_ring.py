"""`WatchRing`: holds the last watches of checkpoints in compact arrays, 10 bytes each, without objects for the garbage collector.

A *watch* follows one checkpoint (a node of the prefix tree) from its placement or last return until the next return
(`return_times`). Watches are numbered in the order in which they began, so their ages are in order too, and a ring holds them:

    number      first ...                       ... end - 1
    age         oldest                             youngest
    slot        number % capacity

If the ring is full, a new watch replaces the oldest one. The replaced watch counts neither as returned nor as survived, so no age
looks better or worse than it is; only less is learned about ages that few watches reach.
"""

from __future__ import annotations

from array import array

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
