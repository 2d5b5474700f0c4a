"""The operator `block_copy`: copies whole KV cache blocks, in order.

A *batch* of copies is a part of the list whose copies do not depend on each other, so that one launch performs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.launch import uses_cpu_kernels, uses_triton

STAGED_BYTES = 64 << 20  # a batch of the torch implementation passes through a buffer, at most this large


def block_copy(blocks: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `blocks[source]` to `blocks[target]` for each (source, target), with the result of one copy after the other.

    `blocks` is one KV cache group's view of the cache memory, [ids, ...] of any dtype and strides; a block is everything at one id.

    Raises:
        ValueError: an id is outside the view.
    """
    num_ids = blocks.shape[0]
    for source, target in pairs:
        if not (0 <= source < num_ids and 0 <= target < num_ids):
            raise ValueError(f"copy {source} -> {target} leaves the {num_ids} block ids of this group.")
    if uses_triton(blocks) and _is_rows_of_words(blocks):
        from transom_kernels.block_copy.gpu import copy_blocks_triton

        for batch in _independent_batches(pairs, most=len(pairs), staged=False):
            copy_blocks_triton(blocks, blocks, batch)
        return
    if uses_cpu_kernels(blocks) and _is_rows_of_bytes(blocks):
        from transom_kernels.block_copy.cpu import copy_blocks_cpu

        for batch in _independent_batches(pairs, most=len(pairs), staged=False):
            copy_blocks_cpu(blocks, batch)
        return
    block_bytes = blocks[0].numel() * blocks.element_size() if pairs else 1
    for batch in _independent_batches(pairs, most=max(1, STAGED_BYTES // block_bytes), staged=True):
        sources = torch.tensor([source for source, _ in batch], device=blocks.device)
        targets = torch.tensor([target for _, target in batch], device=blocks.device)
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))


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
