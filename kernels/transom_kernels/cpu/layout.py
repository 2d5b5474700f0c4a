"""Where the words lie that the pool's threads share: plain numbers, read by Python and compiled into kernels.

All words are int64. A *tag* is the number of a run of the pool. A claim word is `tag << ITEM_BITS | next item`, and a done word
`tag << ITEM_BITS | finished items`. Tags begin at 1, and a claim word is 0 between runs, so that a thread that is late by a run
finds another tag and changes nothing.
"""

ITEM_BITS = 24
ITEM_MASK = (1 << ITEM_BITS) - 1
LINE = 128  # two cache lines, which processors fetch together: what two threads write lies so far apart

# an instruction, in words
INSTRUCTION_WORDS = 64
# kernel's address; address of the number of items; that number; arguments
KERNEL, ITEMS, OWN_ITEMS, ARGUMENTS = 0, 1, 2, 4
MAX_ARGUMENTS = INSTRUCTION_WORDS - ARGUMENTS

# an instruction's claim word, and DONE bytes after it its done word
SYNC_BYTES = 2 * LINE
DONE = LINE

# a thread's words; MASKS_OF is the address of its sets of cpus (CPU_SET_BYTES each), one for each cpu that the launching thread may
# be on, or 0; LAUNCHER_OF the cpu whose set was taken last
SYNC_OF, TAG_OF, ITEMS_OF, SCRATCH_OF, MASKS_OF, LAUNCHER_OF = range(6)
THREAD_BYTES = 2 * LINE
CPU_SET_BYTES = 128

# what one run executes, in words: address of the instructions, their number, address of their claim and done words.
# These words never change, so a thread that is late may still read them.
INSTRUCTIONS, COUNT, SYNC = range(3)
RUNNABLE_BYTES = LINE

# the pool's words: tag of the newest run; whether threads end; how many are parked; what the newest run executes; rounds to spin;
# the cpu that the launching thread was on when the run began
RUN, STOP, PARKED, RUNNABLE, SPIN, LAUNCHER_CPU = (
    0,
    LINE // 8,
    2 * LINE // 8,
    *(3 * LINE // 8 + word for word in range(3)),
)
POOL_BYTES = 4 * LINE
