"""The code of the pool's threads: they execute the instructions of a run, then spin, then park until the next run.

    the launching thread (`run`)                        every other thread (`serve`), until the pool is closed
        write the tag into claim and done words             when the pool's tag changes:
        increase the pool's tag; wake parked threads            execute the instructions
        execute the instructions                            spin; after a while park
        set the claim words to 0

To execute an instruction, a thread calls its kernel, which claims work items until none is left; then the thread waits until all
items are done. `layout.py` defines the words.
"""

from transom_kernels.cpu import layout
from transom_kernels.cpu.language import helper
from transom_kernels.cpu.layout import ITEM_BITS, ITEM_MASK
from transom_kernels.cpu.simd import (
    atomic_add,
    atomic_load,
    atomic_store,
    call,
    pause,
    store_i64_unchecked,
    system_call,
    unchecked_i64,
)
from transom_kernels.cpu.target import cpu_target

# the numbers of Linux's system calls on x86-64, and on ARM64
_FUTEX, _SCHED_YIELD, _SET_AFFINITY, _GET_CPU = (202, 24, 203, 309) if cpu_target().x86 else (98, 124, 122, 168)
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE of one process
_SPINS_BEFORE_YIELD = 2000  # about 50 microseconds, far longer than one work item takes


@helper
def _wait_done(done, tag, items_of):
    """Wait until all items of an instruction are finished and return True; return False if the run is already over."""
    spins = 0
    while True:
        word = atomic_load(done)
        if word >> ITEM_BITS != tag:
            return False
        if word & ITEM_MASK >= unchecked_i64(items_of):
            return True
        pause()
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:  # the thread with the last item may have lost its core to another process
            system_call(_SCHED_YIELD, 0, 0, 0, 0, 0, 0)


@helper
def _execute(tag, runnable, thread):
    """Execute the instructions of a run, one after the other, together with the other threads."""
    instructions = unchecked_i64(runnable + 8 * layout.INSTRUCTIONS)
    sync = unchecked_i64(runnable + 8 * layout.SYNC)
    for index in range(unchecked_i64(runnable + 8 * layout.COUNT)):
        instruction = instructions + index * (layout.INSTRUCTION_WORDS * 8)
        claims = sync + index * layout.SYNC_BYTES
        items_of = unchecked_i64(instruction + 8 * layout.ITEMS)
        store_i64_unchecked(thread + 8 * layout.SYNC_OF, claims)
        store_i64_unchecked(thread + 8 * layout.TAG_OF, tag)
        store_i64_unchecked(thread + 8 * layout.ITEMS_OF, items_of)
        if atomic_load(claims) >> ITEM_BITS == tag:
            call(unchecked_i64(instruction + 8 * layout.KERNEL), instruction + 8 * layout.ARGUMENTS, thread)
        if not _wait_done(claims + layout.DONE, tag, items_of):
            return


@helper
def _keep_off_launcher(pool, thread):
    """Move this thread off the launching thread's CPU, if the launching thread has moved since.

    Otherwise Linux may keep two threads on one CPU for as long as a program runs, while another CPU is idle.
    """
    cpu, masks = unchecked_i64(pool + 8 * layout.LAUNCHER_CPU), unchecked_i64(thread + 8 * layout.MASKS_OF)
    if masks and cpu != unchecked_i64(thread + 8 * layout.LAUNCHER_OF):
        store_i64_unchecked(thread + 8 * layout.LAUNCHER_OF, cpu)
        system_call(_SET_AFFINITY, 0, layout.CPU_SET_BYTES, masks + cpu * layout.CPU_SET_BYTES, 0, 0, 0)


def make_run():
    """Build the launching thread's part of a run: it starts the run, takes part in it, and closes it to threads that come late."""

    def run(pool, thread):
        tag = atomic_load(pool + 8 * layout.RUN) + 1
        runnable = unchecked_i64(pool + 8 * layout.RUNNABLE)
        count, sync = unchecked_i64(runnable + 8 * layout.COUNT), unchecked_i64(runnable + 8 * layout.SYNC)
        system_call(_GET_CPU, pool + 8 * layout.LAUNCHER_CPU, 0, 0, 0, 0, 0)
        for index in range(count):
            claims = sync + index * layout.SYNC_BYTES
            store_i64_unchecked(claims + layout.DONE, tag << ITEM_BITS)
            atomic_store(claims, tag << ITEM_BITS)
        atomic_add(pool + 8 * layout.RUN, 1)
        if atomic_load(pool + 8 * layout.PARKED) > 0:  # wake all of them: up to 2 ** 20
            system_call(_FUTEX, pool + 8 * layout.RUN, _WAKE_PRIVATE, 1 << 20, 0, 0, 0)
        _execute(tag, runnable, thread)
        for index in range(count):  # now the caller may write new instructions: late threads find no items to claim
            atomic_store(sync + index * layout.SYNC_BYTES, 0)

    return run


def make_serve():
    """Build the main function of a pool thread: it takes part in runs until the pool is closed."""

    def serve(pool, thread):
        seen = unchecked_i64(thread + 8 * layout.TAG_OF)
        spins = 0
        while atomic_load(pool + 8 * layout.STOP) == 0:
            tag = atomic_load(pool + 8 * layout.RUN)
            if tag != seen:
                seen, spins = tag, 0
                _keep_off_launcher(pool, thread)
                _execute(tag, atomic_load(pool + 8 * layout.RUNNABLE), thread)
                continue
            pause()
            spins += 1
            if spins > unchecked_i64(pool + 8 * layout.SPIN):
                atomic_add(pool + 8 * layout.PARKED, 1)
                # Linux parks the thread only if RUN still has the tag that this thread has seen, so no run is missed
                system_call(_FUTEX, pool + 8 * layout.RUN, _WAIT_PRIVATE, tag & 0xFFFFFFFF, 0, 0, 0)
                atomic_add(pool + 8 * layout.PARKED, -1)
                spins = 0

    return serve
