"""The frame of every CPU kernel, which claims work items until none is left, and what kernels read of arguments and threads.

A kernel is a function (arguments, thread) without a result. A *word* is an int64, 8 bytes. `arguments` is the address of the
kernel's argument words; `thread` is the address of this thread's own words, which `layout` numbers (`SYNC_OF`, `TAG_OF`, ...). All
threads of the pool call the kernel at once, and each work item goes to one of them:

    def kernel(arguments, thread):                  # the same with a decorator:
        item = claim(thread)
        while item >= 0:                            @each_item
            x = argument(arguments, 0)              def kernel(arguments, thread, item):
            ...                                         x = argument(arguments, 0)
            finish(thread)                              ...
            item = claim(thread)

An *instruction* is a kernel, its arguments and its number of work items. The pool executes a list of instructions in a *run*, whose
number is its *tag*. For each instruction, threads share a *claim word* (`tag << ITEM_BITS | next item`) and a *done word* (`tag <<
ITEM_BITS | finished items`).

Before its first claim a kernel must not read the memory that its arguments point at. A thread may come late, when the run is over
and the memory is used for something else; its first claim then tells it that there is no item.
"""

from collections.abc import Callable

from transom_kernels.cpu.language import helper as helper, inlined
from transom_kernels.cpu.layout import DONE, ITEM_BITS, ITEM_MASK, ITEMS_OF, SCRATCH_OF, SYNC_OF, TAG_OF
from transom_kernels.cpu.simd import (
    argument as argument,
    atomic_add,
    atomic_load,
    compare_and_swap,
    load_i32,
    unchecked_i64,
)


@helper
def row_address(arguments, rows, index):
    """Return the address of row `index`; argument word `rows.tensor` is the tensor's address, `rows.stride` its stride in bytes."""
    return argument(arguments, rows.tensor) + index * argument(arguments, rows.stride)


@helper
def sequence_of(query_offset, num_sequences, token):
    """Return the number of the sequence that has a token, or `num_sequences` if none has it, by binary search. The int32 at address
    `query_offset` are cumulative: sequence i has the tokens from query_offset[i] up to, not including, query_offset[i + 1]."""
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high) // 2
        if load_i32(query_offset + 4 * (middle + 1)) <= token:
            low = middle + 1
        else:
            high = middle
    return low


@helper
def claim(thread):
    """Claim the next item that no thread has; return its number, or -1 if none is left or the thread comes after its run."""
    # `sync` is the address of the claim word
    sync, tag = unchecked_i64(thread + 8 * SYNC_OF), unchecked_i64(thread + 8 * TAG_OF)
    while True:
        word = atomic_load(sync)
        if word >> ITEM_BITS != tag:  # the thread's run is over
            return -1
        item = word & ITEM_MASK
        # Two loads: the thread's word is the address of the number of items, because a launch may take that number from a tensor.
        if item >= unchecked_i64(unchecked_i64(thread + 8 * ITEMS_OF)):
            return -1
        if compare_and_swap(sync, word, word + 1):
            return item


@inlined
def finish(thread):
    """Report a claimed item as done, in the done word. Everything that this thread stored is then visible to all threads."""
    atomic_add(unchecked_i64(thread + 8 * SYNC_OF) + DONE, 1)


def each_item(work: Callable[..., None]) -> Callable[..., None]:
    """Make a kernel of work(arguments, thread, item), which computes one item that this thread has claimed."""
    do = inlined(work)

    def kernel(arguments, thread):
        item = claim(thread)
        while item >= 0:
            do(arguments, thread, item)
            finish(thread)
            item = claim(thread)

    return kernel


@inlined
def scratch(thread):
    """Return the address of this thread's own memory, aligned to 4096 bytes: `scratch_bytes` of the kernel's launch."""
    return unchecked_i64(thread + 8 * SCRATCH_OF)
