"""The threads that run CPU kernels: one pool per process, shared by all of its models.

The launching thread takes part in the work. After a run the other threads spin for a moment, so that the next run of the same step
finds them awake; then they park, so that an idle server costs nothing. Threads claim work items one by one: a thread that loses its
core to another process delays only the item that it has claimed.

- instruction: a kernel, its number of items and its arguments (`layout.py`).
- run: one execution by the threads of a `Runnable`, which is a single instruction or several of a recorded program.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from transom_kernels.cpu import layout
from transom_kernels.cpu.bounds import CHECKED, raise_fault, set_ranges
from transom_kernels.cpu.kernel import CpuKernel, cpu_kernel
from transom_kernels.cpu.memory import lazy_memory
from transom_kernels.cpu.threads import num_threads

# About 120 microseconds: Python takes 40 to 100 between two launches of a prompt's step, waking a parked thread 40 to 90.
SPINS_BEFORE_PARKING = 5000
_MAX_ITEMS = layout.ITEM_MASK
_FIRST_SCRATCH_BYTES = 1 << 20  # takes up space only where a kernel writes (`lazy_memory`)

_Words = NDArray[np.int64]
_Entry = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)  # calls release the GIL


class Pool:
    """`num_threads` threads, including the one that launches."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads.

        Raises:
            OSError: the system is not Linux, whose futex parks the threads.
            Any other error means that kernels cannot be compiled.
        """
        if platform.system() != "Linux":
            raise OSError(f"CPU kernels run on Linux, not on {platform.system()}")
        self.num_threads = num_threads
        self._lock = threading.Lock()
        self._words = _aligned_words(layout.POOL_BYTES)
        self._words[layout.SPIN] = SPINS_BEFORE_PARKING
        self._threads: list[threading.Thread] = []
        self._thread_words = [_aligned_words(layout.THREAD_BYTES) for _ in range(num_threads)]
        self._masks: list[NDArray[np.uint8]] = []
        self._scratch: list[mmap.mmap] = []
        self._scratch_bytes = 0
        self._one = Runnable(1)  # `run_one` writes its instruction here
        self._none = Runnable(0)  # wakes parked threads, so that they see STOP
        self._run_entry = _Entry(cpu_kernel("transom_kernels.cpu.pool_kernel", "make_run").address)
        self._pool_address = self._words.ctypes.data
        for words in self._thread_words:
            words[layout.LAUNCHER_OF] = -1
        self._grow_scratch(_FIRST_SCRATCH_BYTES)
        self._main = self._thread_words[0].ctypes.data
        self._start_threads()

    def run_one(
        self,
        kernel: CpuKernel,
        num_items: int,
        arguments: Sequence[int],
        ranges: list[tuple[int, int]],
        scratch_bytes: int,
    ) -> None:
        """Run one kernel and wait for it.

        Raises:
            ValueError: there are too many items or arguments.
            IndexError: a checked kernel touched memory outside `ranges`.
        """
        address = kernel.address
        with self._lock:
            self._one.write(0, address, num_items, arguments)
            self._run(self._one, scratch_bytes, kernel.name, ranges)

    def run(self, runnable: Runnable, scratch_bytes: int, ranges: list[tuple[int, int]]) -> None:
        """Run instructions one after the other and wait for them. Raises IndexError as `run_one` does."""
        with self._lock:
            self._run(runnable, scratch_bytes, "program", ranges)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._words[layout.STOP] = 1
            if self._threads:
                self._run(self._none, 0, "", [])
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _run(self, runnable: Runnable, scratch_bytes: int, name: str, ranges: list[tuple[int, int]]) -> None:
        if scratch_bytes > self._scratch_bytes:
            self._grow_scratch(scratch_bytes)
        self._words[layout.RUNNABLE] = runnable.address
        if CHECKED:
            scratch = [(int(own[layout.SCRATCH_OF]), self._scratch_bytes) for own in self._thread_words]
            set_ranges([*ranges, *scratch])
        self._run_entry(self._pool_address, self._main)
        if CHECKED:
            raise_fault(name)

    def _grow_scratch(self, num_bytes: int) -> None:
        """Give every thread new scratch memory. No run is in progress, and a thread that comes late does not use its scratch."""
        self._scratch_bytes = 1 << (num_bytes - 1).bit_length()
        self._scratch = [lazy_memory(self._scratch_bytes) for _ in range(self.num_threads)]
        for words, memory in zip(self._thread_words, self._scratch, strict=True):
            words[layout.SCRATCH_OF] = np.frombuffer(memory, dtype=np.uint8).ctypes.data

    def _start_threads(self) -> None:
        if self.num_threads == 1:
            return
        serve = _Entry(cpu_kernel("transom_kernels.cpu.pool_kernel", "make_serve").address)
        usable = sorted(os.sched_getaffinity(0))
        for index, words in enumerate(self._thread_words[1:], start=1):
            if len(usable) > 1:
                self._masks.append(_cpu_sets(usable, index, self.num_threads))
                words[layout.MASKS_OF] = self._masks[-1].ctypes.data
            address = words.ctypes.data
            thread = threading.Thread(
                target=serve, args=(self._pool_address, address), daemon=True, name="transom-kernels"
            )
            thread.start()
            self._threads.append(thread)


class Runnable:
    """The instructions that a run executes, and the words by which threads claim their work items (`layout.py`)."""

    def __init__(self, num_instructions: int) -> None:
        self._instructions = _aligned_words(max(1, num_instructions) * layout.INSTRUCTION_WORDS * 8)
        self._sync = _aligned_words(max(1, num_instructions) * layout.SYNC_BYTES)
        self._words = _aligned_words(layout.RUNNABLE_BYTES)
        self._words[layout.INSTRUCTIONS] = self._instructions.ctypes.data
        self._words[layout.COUNT] = num_instructions
        self._words[layout.SYNC] = self._sync.ctypes.data
        self.kept: list[object] = []  # tensors from which instructions read their number of items
        self._own_items = self._instructions.ctypes.data + 8 * layout.OWN_ITEMS
        self.address = self._words.ctypes.data

    def write(
        self, index: int, kernel_address: int, num_items: int, arguments: Sequence[int], *, items_address: int = 0
    ) -> None:
        """Write instruction `index`. If `items_address` is given, threads read the number of items there in each run.

        Raises:
            ValueError: there are too many items or arguments.
        """
        if num_items > _MAX_ITEMS or len(arguments) > layout.MAX_ARGUMENTS:
            raise ValueError(
                f"{num_items} items, {len(arguments)} arguments; a launch takes up to {_MAX_ITEMS} and {layout.MAX_ARGUMENTS}."
            )
        begin = index * layout.INSTRUCTION_WORDS
        items_address = items_address or self._own_items + 8 * begin
        first = begin + layout.ARGUMENTS
        self._instructions[begin : first + len(arguments)] = [kernel_address, items_address, num_items, 0, *arguments]


_runnables: list[Runnable] = []  # of all programs; never freed, since a thread that comes late may still read them


def new_runnable(num_instructions: int) -> Runnable:
    """Return memory for a program's instructions, which lives as long as the process."""
    _runnables.append(Runnable(num_instructions))
    return _runnables[-1]


_pool: Pool | None = None
_pool_lock = threading.Lock()


def pool() -> Pool:
    """Return the process's pool. The first call starts its threads; the first call after `set_num_threads` starts a new pool."""
    global _pool
    if _pool is None or _pool.num_threads != num_threads():
        with _pool_lock:
            if _pool is None or _pool.num_threads != num_threads():
                before, _pool = _pool, Pool(num_threads())
                if before is not None:
                    before.close()
    return _pool


def _forget_pool() -> None:
    """Forget the pool in a forked child, which has none of its parent's threads."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _cpu_sets(usable: list[int], index: int, num_threads: int) -> NDArray[np.uint8]:
    """Return the CPU sets of thread `index`, as [CPU of the launching thread, CPU_SET_BYTES]: bit c is set if CPU c is allowed.

    If there are as many threads as usable CPUs, each thread has its own CPU. Fewer threads may use all CPUs but the launching
    thread's.
    """
    # for any CPU that a set of CPU_SET_BYTES can name
    sets = np.zeros((8 * layout.CPU_SET_BYTES, 8 * layout.CPU_SET_BYTES), dtype=np.uint8)
    sets[:, usable] = 1  # stays so for launching threads on CPUs outside `usable`
    for launcher in usable:
        others = [cpu for cpu in usable if cpu != launcher]
        sets[launcher] = 0
        sets[launcher, others[index - 1] if num_threads == len(usable) else others] = 1
    return np.packbits(sets, axis=1, bitorder="little")


def _aligned_words(num_bytes: int) -> _Words:
    """Return zeroed words that begin at a multiple of a page."""
    raw = np.zeros(num_bytes + 4096, dtype=np.uint8)
    begin = -raw.ctypes.data % 4096
    return raw[begin : begin + num_bytes].view(np.int64)
