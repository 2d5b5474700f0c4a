"""The floor of a decode step on CPUs: the bytes of the weights that it reads, over the speed at which this machine reads memory."""

from __future__ import annotations

import json
import mmap
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ARRAY_BYTES = 1 << 30
PASSES = 6
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class ReadBandwidth:
    """Bytes per second that the cores read together.

    One thread per core adds up its part of an array that is much larger than the caches. Integers are added, so the compiler may
    use vectors, and with them one core reads as fast as it can. The array's pages are touched once; `measure` takes about a second.
    """

    def __init__(self, num_threads: int, array_bytes: int = ARRAY_BYTES) -> None:
        memory = mmap.mmap(-1, array_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._array = np.frombuffer(memory, dtype=np.uint64)
        self._array[:] = 1
        self._parts = np.array_split(self._array, num_threads)
        self._add_up = _compiled_sum()
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


def bytes_of_a_step(folder: Path) -> int:
    """All tensors of a folder of safetensors, except the embedding where the head has a matrix of its own: a step reads only rows
    of it."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        sizes |= {name: end - begin for name, (begin, end) in _offsets(path).items()}
    untied = HEAD in sizes
    return sum(size for name, size in sizes.items() if not (untied and name.endswith(EMBEDDING)))


def _offsets(path: Path) -> dict[str, tuple[int, int]]:
    """First and last byte of each tensor. The file begins with the header's length and the header in JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}


def _compiled_sum() -> Callable[[Any], Any]:
    """A function that adds up an array without the interpreter's lock."""
    import numba

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def total(values: Any) -> Any:
        # Four places at once keep more reads under way than one does.
        quarter, found = values.size // 4, np.uint64(0)
        for i in range(quarter):
            found += values[i] + values[i + quarter] + values[i + 2 * quarter] + values[i + 3 * quarter]
        return found

    return total  # type: ignore[no-any-return]
