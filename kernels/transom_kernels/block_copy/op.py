"""The operators `block_copy` and `block_copy_between`: copy whole KV cache blocks, in order.

A *batch* of copies is a part of the list whose copies do not depend on each other, so that one launch performs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from transom_kernels.launch import uses_cpu_kernels, uses_triton

STAGED_BYTES = 64 << 20  # a batch of the torch implementation passes through a buffer, at most this large
# Runs of blocks at least this large pass between host and GPU by copy engines, which leave the multiprocessors to the step; below,
# starting one copy after the other would take longer than the copies, and one kernel moves all blocks.
ENGINE_BYTES = 64 << 10


def block_copy(blocks: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `blocks[source]` to `blocks[target]` for each (source, target), with the result of one copy after the other.

    `blocks` is one KV cache group's view of the cache memory, [ids, ...] of any dtype and strides; a block is everything at one id.

    Raises:
        ValueError: an id is outside the view.
    """
    _check_ids(blocks, blocks, pairs)
    if uses_triton(blocks) and _is_rows_of_words(blocks):
        from transom_kernels.block_copy.gpu import copy_blocks_triton

        for batch in _independent_batches(pairs, most=len(pairs), staged=False):
            copy_blocks_triton(blocks, blocks, batch)
        return
    if uses_cpu_kernels(blocks) and _is_rows_of_bytes(blocks):
        from transom_kernels.block_copy.cpu import copy_blocks_cpu

        for batch in _independent_batches(pairs, most=len(pairs), staged=False):
            copy_blocks_cpu(blocks, blocks, batch)
        return
    block_bytes = blocks[0].numel() * blocks.element_size() if pairs else 1
    for batch in _independent_batches(pairs, most=max(1, STAGED_BYTES // block_bytes), staged=True):
        sources = torch.tensor([source for source, _ in batch], device=blocks.device)
        targets = torch.tensor([target for _, target in batch], device=blocks.device)
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def block_copy_between(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `source[s]` to `target[t]` for each (s, t), with the result of one copy after the other.

    `source` and `target` are one KV cache group's views of two memories that do not overlap, [ids, bytes] of uint8 with contiguous
    rows of equal length. At most one of them is a GPU's; the other is then pinned host memory, and the copies run on the current
    stream.

    Raises:
        ValueError: an id is outside its view, or the rows differ in length.
    """
    _check_ids(source, target, pairs)
    if source.shape[1:] != target.shape[1:]:
        raise ValueError(f"blocks of {source.shape[1:]} bytes cannot be copied to blocks of {target.shape[1:]} bytes.")
    device = source if source.is_cuda else target
    by_kernel = not device.is_cuda or source.shape[1] < ENGINE_BYTES
    if uses_triton(device) and by_kernel and _is_rows_of_words(source) and _is_rows_of_words(target):
        from transom_kernels.block_copy.gpu import copy_blocks_triton

        for batch in _batches_of_targets(pairs):
            copy_blocks_triton(source, target, batch)
    elif uses_cpu_kernels(device) and _is_rows_of_bytes(source) and _is_rows_of_bytes(target):
        from transom_kernels.block_copy.cpu import copy_blocks_cpu

        for batch in _batches_of_targets(pairs):
            copy_blocks_cpu(source, target, batch)
    else:
        for first, to, count in _runs(pairs):
            target[to : to + count].copy_(source[first : first + count], non_blocking=True)


def _check_ids(sources: torch.Tensor, targets: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for source, target in pairs:
        if not (0 <= source < sources.shape[0] and 0 <= target < targets.shape[0]):
            raise ValueError(
                f"copy {source} -> {target} leaves the {sources.shape[0]} and {targets.shape[0]} block ids of this group."
            )


def _batches_of_targets(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split the list before each copy whose target another copy of its batch has."""
    batches: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for pair in pairs:
        if not batches or pair[1] in written:
            batches.append([])
            written = set()
        batches[-1].append(pair)
        written.add(pair[1])
    return batches


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield neighbouring copies of consecutive blocks as (first source, first target, count)."""
    first = 0
    for end in range(1, len(pairs) + 1):
        source, target = pairs[end - 1]
        if end == len(pairs) or pairs[end] != (source + 1, target + 1):
            yield *pairs[first], end - first
            first = end


def _is_rows_of_bytes(blocks: torch.Tensor) -> bool:
    """Whether `blocks` is a matrix of bytes whose rows are contiguous."""
    return blocks.dtype == torch.uint8 and blocks.dim() == 2 and blocks.stride(1) == 1


def _is_rows_of_words(blocks: torch.Tensor) -> bool:
    """Whether `blocks` is a matrix of bytes whose rows are contiguous 32-bit words, as the Triton kernel needs."""
    return _is_rows_of_bytes(blocks) and not blocks.shape[1] % 4


def _independent_batches(pairs: Sequence[tuple[int, int]], *, most: int, staged: bool) -> list[list[tuple[int, int]]]:
    """Split the list before each copy that reads or writes a block which an earlier copy of its batch wrote.

    Without `staged`, a copy may not overwrite a block that an earlier copy of its batch reads, either; with `staged` all blocks of
    a batch are read before any is written. A batch has at most `most` copies.
    """
    batches: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        depends = source in written or target in written or (not staged and target in read)
        if not batches or len(batches[-1]) == most or depends:
            batches.append([])
            read, written = set(), set()
        batches[-1].append((source, target))
        read.add(source)
        written.add(target)
    return batches
