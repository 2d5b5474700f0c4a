"""Holds the last watches of checkpoints in compact arrays, 10 bytes each, which Python's garbage collector does not visit.

*Watch*: one checkpoint from its placement or last return on, until the next return (`return_times`). Watches are numbered in the
order in which they began, so their ages are in order too, and a ring holds them:

    number      first ...                       ... end - 1
    age         oldest                             youngest
    slot        number % capacity

Beyond the capacity the oldest watch is dropped. From then on it counts neither as returned nor as survived, so no age looks better
or worse than it is; only less is learned about ages that few watches reach.
"""

from __future__ import annotations

from array import array

MAX_WATCHES = 2**20  # 10 MiB
_ENDED = 0x8000  # bit of the class


class WatchRing:
    """Holds class, beginning and end of the last `capacity` watches. A class is a number below 32,768."""

    def __init__(self, capacity: int = MAX_WATCHES) -> None:
        self.first = 0  # number of the oldest watch that is held
        self.end = 0  # number of the next watch
        self._capacity = capacity
        self._began = array("Q")
        self._class = array("H")

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return len(self._began) * (self._began.itemsize + self._class.itemsize)

    @property
    def is_full(self) -> bool:
        """Whether the next watch takes the place of the oldest."""
        return self.end - self.first == self._capacity

    def begin(self, class_id: int, now: int) -> int:
        """Begin a watch and return its number; the oldest one is dropped if the ring is full."""
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
        """End a watch; return whether it was held and had not ended."""
        if number < self.first or self._class[number % self._capacity] & _ENDED:
            return False
        self._class[number % self._capacity] |= _ENDED
        return True

    def began_at(self, number: int) -> int:
        """Return when a watch that is held began."""
        return self._began[number % self._capacity]

    def class_of_running(self, number: int) -> int | None:
        """Return the class of a watch that is held; None if it has ended."""
        class_id = self._class[number % self._capacity]
        return None if class_id & _ENDED else class_id
