"""The speed at which this machine reads memory, in bytes per second: the floor of a decode step is its weights divided by it.

One thread per core adds up its part of an array that is much larger than the caches. Integers are added, so the compiler may use
vectors, and with them one core reads as fast as it can. Each measurement is the best of a few passes. Without numba, numpy adds.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ARRAY_BYTES = 1 << 30
PASSES = 6


class ReadBandwidth:
    """Holds the array, whose pages are touched once. `measure` takes about a second."""

    def __init__(self, num_threads: int, array_bytes: int = ARRAY_BYTES) -> None:
        memory = mmap.mmap(-1, array_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._array = np.frombuffer(memory, dtype=np.uint64)
        self._array[:] = 1
        self._parts = np.array_split(self._array, num_threads)
        self._add_up = add_up()
        self._add_up(self._array[:1000])

    def measure(self) -> float:
        """Bytes per second of the best pass."""
        return self._array.nbytes / min(self._pass_s() for _ in range(PASSES))

    def _pass_s(self) -> float:
        threads = [threading.Thread(target=self._add_up, args=(part,)) for part in self._parts]
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin_s


def add_up() -> Callable[[Any], Any]:
    """A function that adds up an array without the interpreter's lock: compiled by numba, else numpy's."""
    try:
        import numba
    except ImportError:
        return np.sum

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def total(values: Any) -> Any:
        # Four places at once keep more reads under way than one does.
        quarter, found = values.size // 4, np.uint64(0)
        for i in range(quarter):
            found += values[i] + values[i + quarter] + values[i + 2 * quarter] + values[i + 3 * quarter]
        return found

    return total  # type: ignore[no-any-return]
