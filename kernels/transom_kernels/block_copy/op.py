"""The operators `block_copy`, which copies KV cache blocks inside one memory, and `block_copy_between`, between two memories.

The result is the same as if the copies ran one after the other. A list of copies is cut into *batches*: the copies of a batch do
not depend on each other, so one launch performs all of them at once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import launch
from transom_kernels.cpu.simd import load_i64, load_u8, load_words, store_u8, store_words
from transom_kernels.cpu.work import argument, each_item
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton

Pairs = Sequence[tuple[int, int]]  # (source, target) block ids

# The GPU's copy engines copy blocks of at least this many bytes between host and GPU; the multiprocessors stay free for the model's
# step. To start a copy engine for each smaller block would take longer than the copies, so one kernel copies all of those.
ENGINE_BYTES = 64 << 10


def block_copy(blocks: torch.Tensor, pairs: Pairs) -> None:
    """Copy `blocks[source]` to `blocks[target]` for each (source, target), as if one copy followed the other.

    `blocks` is one KV cache group's view of the cache memory, [ids, ...] of any dtype and strides; `blocks[id]` is one block.

    Raises:
        ValueError: an id is outside the view.
    """
    _check_ids(blocks, blocks, pairs)
    copy_blocks = _kernel(blocks, blocks, blocks)
    if copy_blocks is None:
        block_copy_reference(blocks, pairs)
        return
    for batch in _batches(pairs, within_one_memory=True):
        copy_blocks(blocks, blocks, batch)


def block_copy_between(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy `source[s]` to `target[t]` for each (s, t), as if one copy followed the other.

    `source` and `target` are one KV cache group's views of two memories that do not overlap, [ids, bytes] of uint8 with contiguous
    rows of equal length. At most one of them is on a GPU; the other is then pinned host memory, and the copies run on the current
    CUDA stream.

    Raises:
        ValueError: an id is outside its view, or the rows differ in length.
    """
    _check_ids(source, target, pairs)
    if source.shape[1:] != target.shape[1:]:
        raise ValueError(f"blocks of {source.shape[1:]} bytes cannot be copied to blocks of {target.shape[1:]} bytes.")
    device = source if source.is_cuda else target
    copy_blocks = None if device.is_cuda and source.shape[1] >= ENGINE_BYTES else _kernel(device, source, target)
    if copy_blocks is None:
        for first, to, count in _runs(pairs):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)
        return
    for batch in _batches(pairs, within_one_memory=False):
        copy_blocks(source, target, batch)


def block_copy_reference(blocks: torch.Tensor, pairs: Pairs) -> None:
    """Copy one block after the other, in torch: the specification of `block_copy`."""
    for source, target in pairs:
        blocks[target] = blocks[source].clone()


def _check_ids(sources: torch.Tensor, targets: torch.Tensor, pairs: Pairs) -> None:
    for source, target in pairs:
        if not (0 <= source < sources.shape[0] and 0 <= target < targets.shape[0]):
            raise ValueError(
                f"copy {source} -> {target} leaves the {sources.shape[0]} and {targets.shape[0]} block ids of this group."
            )


def _kernel(device: torch.Tensor, *memories: torch.Tensor) -> Callable[..., None] | None:
    """Return the function that copies a batch of blocks between `memories` on `device`'s device; None if no kernel can."""
    if not all(blocks.dtype == torch.uint8 and blocks.dim() == 2 and blocks.stride(1) == 1 for blocks in memories):
        return None
    if uses_triton(device) and all(
        blocks.shape[1] % 4 == 0 for blocks in memories
    ):  # the kernel copies words of 32 bits
        return implementation("block_copy.gpu", "copy_blocks_triton")
    return copy_blocks_cpu if uses_cpu_kernels(device) else None


def _batches(pairs: Pairs, *, within_one_memory: bool) -> list[list[tuple[int, int]]]:
    """Cut a list of copies into batches, in order: no copy reads or writes what another copy of its batch writes.

    Source and target ids name the same blocks only `within_one_memory`; otherwise a copy cannot read what another one writes.
    """
    batches: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if not batches or target in written or (within_one_memory and (source in written or target in read)):
            batches.append([])
            read, written = set(), set()
        batches[-1].append((source, target))
        read.add(source)
        written.add(target)
    return batches


def _runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """Yield runs of copies whose sources and targets are both consecutive blocks, as (first source, first target, count)."""
    first = 0
    for end in range(1, len(pairs) + 1):
        source, target = pairs[end - 1]
        if end == len(pairs) or pairs[end] != (source + 1, target + 1):
            yield *pairs[first], end - first
            first = end


# --- the CPU kernel and its launch

ITEM_BYTES = 32 << 10  # bytes of a block that one work item copies, so that several threads share a large block


def copy_blocks_cpu(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `source[s]` to `target[t]` for each pair (s, t), all at once: no copy may read or write what another copy writes.

    `source` and `target` are [ids, bytes] of uint8 with contiguous rows of equal length; they may be the same tensor.
    """
    if not pairs:
        return
    sources, targets = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
    num_bytes = source.shape[1]
    launch(
        cpu_kernel("transom_kernels.block_copy.op", "make_copy_blocks"),
        len(pairs) * -(-num_bytes // ITEM_BYTES),
        [source, sources, targets, num_bytes, source.stride(0), ITEM_BYTES, target, target.stride(0)],
    )


def make_copy_blocks() -> Any:
    """Build the kernel. A work item is a part of one block.

    Argument words: 0 source blocks, 1 sources [copies] int64, 2 targets [copies] int64, 3 bytes of a block, 4 stride of the source
    blocks in bytes, 5 bytes of an item, a multiple of 64, 6 target blocks, 7 their stride in bytes.
    """

    @each_item
    def copy_blocks(arguments, thread, item):
        num_bytes, step = argument(arguments, 3), argument(arguments, 5)
        parts = (num_bytes + step - 1) // step
        copy, first = item // parts, item % parts * step
        last = min(first + step, num_bytes)
        full = last // 64 * 64
        source = argument(arguments, 0) + load_i64(argument(arguments, 1) + copy * 8) * argument(arguments, 4)
        target = argument(arguments, 6) + load_i64(argument(arguments, 2) + copy * 8) * argument(arguments, 7)
        for at in range(first, full, 64):
            store_words(target + at, load_words(source + at))
        for at in range(max(first, full), last):
            store_u8(target + at, load_u8(source + at))

    return copy_blocks
