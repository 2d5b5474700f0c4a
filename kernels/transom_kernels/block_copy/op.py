"""The operators `block_copy`, which copies KV cache blocks inside one memory, and `block_copy_between`, between two memories.

Results are those of one copy after the other. Lists are cut into *batches* of copies that do not depend on each other, so that one
launch performs a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from transom_kernels.launch import uses_cpu_kernels, uses_triton

Pairs = Sequence[tuple[int, int]]  # (source, target) block ids

# Blocks of at least this many bytes are copied between host and GPU by copy engines, which leave the multiprocessors to the step.
# For smaller blocks starting copies would take longer than the copies, so that one kernel moves all of them.
ENGINE_BYTES = 64 << 10


def block_copy(blocks: torch.Tensor, pairs: Pairs) -> None:
    """Copy `blocks[source]` to `blocks[target]` for each (source, target), as if one copy followed the other.

    `blocks` is one KV cache group's view of the cache memory, [ids, ...] of any dtype and strides; a block is everything at one id.

    Raises:
        ValueError: an id is outside the view.
    """
    _check_ids(blocks, blocks, pairs)
    if uses_triton(blocks) and _is_rows_of_words(blocks):
        from transom_kernels.block_copy.gpu import copy_blocks_triton as copy_blocks
    elif uses_cpu_kernels(blocks) and _is_rows_of_bytes(blocks):
        from transom_kernels.block_copy.cpu import copy_blocks_cpu as copy_blocks
    else:
        block_copy_reference(blocks, pairs)
        return
    for batch in _independent_batches(pairs):
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
    by_kernel = not device.is_cuda or source.shape[1] < ENGINE_BYTES
    if uses_triton(device) and by_kernel and _is_rows_of_words(source) and _is_rows_of_words(target):
        from transom_kernels.block_copy.gpu import copy_blocks_triton as copy_blocks
    elif uses_cpu_kernels(device) and _is_rows_of_bytes(source) and _is_rows_of_bytes(target):
        from transom_kernels.block_copy.cpu import copy_blocks_cpu as copy_blocks
    else:
        for first, to, count in _runs(pairs):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)
        return
    for batch in _batches_of_targets(pairs):
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


def _independent_batches(pairs: Pairs) -> list[list[tuple[int, int]]]:
    """Cut copies within one memory into batches: no copy reads or writes a block that another copy of its batch writes."""
    batches: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if not batches or source in written or target in written or target in read:
            batches.append([])
            read, written = set(), set()
        batches[-1].append((source, target))
        read.add(source)
        written.add(target)
    return batches


def _batches_of_targets(pairs: Pairs) -> list[list[tuple[int, int]]]:
    """Cut copies to another memory into batches: no two copies of a batch have the same target."""
    batches: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for pair in pairs:
        if not batches or pair[1] in written:
            batches.append([])
            written = set()
        batches[-1].append(pair)
        written.add(pair[1])
    return batches


def _runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """Yield neighbouring copies of consecutive blocks as (first source, first target, count)."""
    first = 0
    for end in range(1, len(pairs) + 1):
        source, target = pairs[end - 1]
        if end == len(pairs) or pairs[end] != (source + 1, target + 1):
            yield *pairs[first], end - first
            first = end


def _is_rows_of_bytes(blocks: torch.Tensor) -> bool:
    """Return whether `blocks` is a matrix of bytes whose rows are contiguous."""
    return blocks.dtype == torch.uint8 and blocks.dim() == 2 and blocks.stride(1) == 1


def _is_rows_of_words(blocks: torch.Tensor) -> bool:
    """Return whether `blocks` is a matrix of bytes whose rows are contiguous 32-bit words, as the Triton kernel needs."""
    return _is_rows_of_bytes(blocks) and not blocks.shape[1] % 4
