"""`PrefixTable`: owns the arrays of the fleet's prefix index and lets them grow; `index_code` has the compiled code that works on
them.

Each *part* of the hash table grows by itself, by an eighth (a small one by half). So parts in use are 75 to 85 % full, and an entry
takes 14 to 16 bytes. The array of sets of holders doubles when it is full.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transom_cluster.routing import index_code as code
from transom_cluster.routing.index_code import Words
from transom_core.contract.kv_events import KvRun

LEAST_SLOTS = 8  # of a part
SMALL_SLOTS = 256  # parts up to this size grow by half
LEAST_SETS = 64  # the number of sets stays a power of two: `index_code` masks hashes with it
WORD_BITS = 64


class Run(NamedTuple):
    """Blocks [begin, end) of one group, which the same holders have; bit h of `holders` is set for holder number h."""

    begin: int
    end: int
    holders: int


class PrefixTable:
    """Records which holder has which block of which group. Holders are numbers from 0 on. Not thread-safe."""

    def __init__(self) -> None:
        self.parts = np.zeros((code.NUM_PARTS, 3), np.int64)
        self._slots: list[npt.NDArray[np.uint8]] = [np.zeros(0, np.uint8) for _ in range(code.NUM_PARTS)]
        for part in range(code.NUM_PARTS):
            self._resize_part(part, LEAST_SLOTS)
        self.sets = np.zeros((1, 1), np.uint64)  # one set of holders a row; row 0 is not used
        self._uses = np.zeros(1, np.int32)
        self._counts = np.zeros(2, np.int64)
        self._make_sets(LEAST_SETS, 1)

    @property
    def num_words(self) -> int:
        """Return the length of a set of holders in 64-bit words."""
        return int(self.sets.shape[1])

    def fit_holders(self, num_holders: int) -> None:
        """Make room for holders `0` to `num_holders - 1`."""
        if num_holders > WORD_BITS * self.num_words:
            self._make_sets(len(self.sets), -(-num_holders // WORD_BITS))

    def apply(self, holder: int, runs: Sequence[KvRun]) -> int:
        """Apply changes of a worker's blocks in order; return how many blocks it has gained (negative if it has lost some).

        `holder` is the number of the worker's device tier; the next numbers are its other tiers.
        """
        digests = np.frombuffer(b"".join([b"".join(run.digests) for run in runs]), dtype=np.uint64)
        lengths = array("q")
        for action, group, of_run, tier in runs:
            lengths.extend((group, action == "added", len(of_run), tier))
        changes = np.frombuffer(lengths, np.int64).reshape(-1, 4)
        cursor = np.zeros(4, np.int64)
        if len(digests):
            while (full := code.apply_runs(self.parts, *self._of_sets, holder, digests, changes, cursor)) != code.DONE:
                if full == code.SETS_FULL:
                    self._make_sets(2 * len(self.sets), self.num_words)
                else:
                    self._grow_part(full)
        return int(cursor[code.NET])

    def clear(self, part: int, holders: Sequence[int]) -> int:
        """Remove holders from one of the `NUM_PARTS` parts, and shrink it if it is less than half full; return its old capacity."""
        bits = np.zeros(WORD_BITS * self.num_words, np.uint8)
        bits[holders] = 1
        words = np.packbits(bits, bitorder="little").view(np.uint64)
        at = 0
        while (at := code.clear_holders(self.parts[part], *self._of_sets, words, at)) != code.DONE:
            self._make_sets(2 * len(self.sets), self.num_words)
        _, capacity, count = self.parts[part]
        if capacity > LEAST_SLOTS and 2 * count < capacity:  # shrink to 75 % full
            self._resize_part(part, max(LEAST_SLOTS, int(count) * 4 // 3 + 1))
        return int(capacity)

    def find_runs(self, digests: Words, group: int, step: int, begin: int, end: int) -> list[Run]:
        """Return which holders have the blocks [begin, end) of one group.

        A block of the group spans `step` hash blocks, so block `i` has the digest of its last one, `(i + 1) * step - 1`.
        """
        ends, values = np.empty(end - begin, np.int64), np.empty(end - begin, np.int32)
        count = code.find_runs(self.parts, digests, group, step, begin, end, ends, values)
        runs = []
        for run_end, value in zip(ends[:count].tolist(), values[:count].tolist(), strict=True):
            holders = 1 << -value - 1 if value < 0 else int.from_bytes(self.sets[value].tobytes(), "little")
            runs.append(Run(begin, run_end, holders))
            begin = run_end
        return runs

    def _make_sets(self, num_sets: int, num_words: int) -> None:
        """Allocate arrays for this many sets (a power of two) of this many words, and copy the present sets into them."""
        sets, uses = np.zeros((num_sets, num_words), np.uint64), np.zeros(num_sets, np.int32)
        sets[: len(self.sets), : self.num_words] = self.sets
        uses[: len(self._uses)] = self._uses
        self.sets, self._uses = sets, uses
        links, buckets = np.zeros(num_sets, np.int32), np.zeros(num_sets, np.int32)
        self._of_sets = (sets, uses, links, buckets, self._counts)
        code.link_sets(*self._of_sets)

    def _grow_part(self, part: int) -> None:
        capacity = int(self.parts[part, code.CAPACITY])
        self._resize_part(part, capacity + capacity // (2 if capacity <= SMALL_SLOTS else 8))

    def _resize_part(self, part: int, num_slots: int) -> None:
        slots = np.zeros(num_slots * code.SLOT_BYTES, np.uint8)
        row = np.array([slots.ctypes.data, num_slots, 0], np.int64)
        code.move_part(self.parts[part], row)
        self.parts[part], self._slots[part] = row, slots
