"""The memory layout of the words that the pool's threads share: offsets that Python reads and that are compiled into kernels.

All words are int64. A *tag* is the number of a run of the pool. An instruction's *claim word* is `tag << ITEM_BITS | next item`,
and its *done word* is `tag << ITEM_BITS | finished items`. Tags begin at 1, and claim words are 0 between runs, so that a thread
that comes late, when the run is over, finds another tag and changes nothing.
"""

ITEM_BITS = 24
ITEM_MASK = (1 << ITEM_BITS) - 1
LINE = 128  # two cache lines, which processors fetch together: words that different threads write are this far apart

# an instruction: its size in words
INSTRUCTION_WORDS = 64
# its words: address of the kernel; address of the number of items; that number, if it is stored here; arguments
KERNEL, ITEMS, OWN_ITEMS, ARGUMENTS = 0, 1, 2, 4
MAX_ARGUMENTS = INSTRUCTION_WORDS - ARGUMENTS

# an instruction's claim word and, DONE bytes after it, its done word
SYNC_BYTES = 2 * LINE
DONE = LINE

# a thread's words. MASKS_OF is the address of its CPU sets (CPU_SET_BYTES each), one for each CPU on which the launching thread may
# be, or 0; LAUNCHER_OF is the CPU for which the thread has set its affinity last
SYNC_OF, TAG_OF, ITEMS_OF, SCRATCH_OF, MASKS_OF, LAUNCHER_OF = range(6)
THREAD_BYTES = 2 * LINE
CPU_SET_BYTES = 128

# the words of what a run executes: address of the instructions, their number, address of their claim and done words.
# They never change, so a thread that comes late may still read them.
INSTRUCTIONS, COUNT, SYNC = range(3)
RUNNABLE_BYTES = LINE

# the pool's words: tag of the newest run; whether threads shall end; how many are parked; what the newest run executes; how often
# to spin before parking; the CPU on which the launching thread was when the run began
RUN, STOP, PARKED, RUNNABLE, SPIN, LAUNCHER_CPU = (
    0,
    LINE // 8,
    2 * LINE // 8,
    *(3 * LINE // 8 + word for word in range(3)),
)
POOL_BYTES = 4 * LINE
