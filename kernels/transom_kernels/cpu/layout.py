"""The memory layout of the words that the pool's threads share: offsets that Python reads and that are compiled into kernels.

All words are int64. Offsets are in words, except LINE, DONE and names that end in BYTES, which are in bytes.

A *run* is one execution of a list of instructions by all threads; an *instruction* is a kernel, its number of
work items and its arguments. A *tag* is the number of a run. An instruction's *claim word* is `tag << ITEM_BITS | next item`, and
its *done word* is `tag << ITEM_BITS | finished items`. Tags begin at 1, and claim words are 0 between runs. A thread that comes
late, when its run is over, therefore finds another tag and changes nothing.
"""

ITEM_BITS = 24  # low bits of a claim or done word; the tag has the rest
ITEM_MASK = (1 << ITEM_BITS) - 1
LINE = 128  # two cache lines, which processors fetch together: words that different threads write are this far apart

# an instruction: its size in words
INSTRUCTION_WORDS = 64
# its words: address of the kernel; address of the number of items; that number, if it is stored here; one unused; arguments
KERNEL, ITEMS, OWN_ITEMS, ARGUMENTS = 0, 1, 2, 4
MAX_ARGUMENTS = INSTRUCTION_WORDS - ARGUMENTS

# an instruction's claim word and, DONE bytes after it, its done word
SYNC_BYTES = 2 * LINE
DONE = LINE

# a thread's words. SYNC_OF, TAG_OF and ITEMS_OF are of the instruction that it executes: address of the claim word, tag, address of
# the number of items. SCRATCH_OF is the address of its scratch memory. MASKS_OF is the address of its CPU sets (CPU_SET_BYTES
# each), one for each CPU on which the launching thread may be, or 0; LAUNCHER_OF is the launching thread's CPU when this thread
# last set its affinity.
SYNC_OF, TAG_OF, ITEMS_OF, SCRATCH_OF, MASKS_OF, LAUNCHER_OF = range(6)
THREAD_BYTES = 2 * LINE
CPU_SET_BYTES = 128

# the words of a `pool.Runnable`, the list of instructions that a run executes: address of the instructions, their number, address
# of their claim and done words. These words never change, so a thread that comes late may still read them.
INSTRUCTIONS, COUNT, SYNC = range(3)
RUNNABLE_BYTES = LINE

# the pool's words: tag of the newest run; whether threads shall end; how many are parked; address of the newest run's `Runnable`;
# how often to spin before parking; the CPU on which the launching thread was when the run began
RUN, STOP, PARKED, RUNNABLE, SPIN, LAUNCHER_CPU = (
    0,
    LINE // 8,
    2 * LINE // 8,
    *(3 * LINE // 8 + word for word in range(3)),
)
POOL_BYTES = 4 * LINE
