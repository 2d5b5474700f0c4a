"""`block_copy`: copy whole blocks, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transom_kernels.launch import uses_triton

STAGED_BYTES = 64 << 20  # a run passes through memory of its own


def block_copy(blocks: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy `blocks[source]` over `blocks[target]` for each (source, target), as if one after the other.

    `blocks` is a group's view of the slab, [ids, ...] of any dtype and strides; a block is everything behind its id.

    Raises:
        ValueError: an id outside the view.
    """
    num_ids = blocks.shape[0]
    for source, target in pairs:
        if not (0 <= source < num_ids and 0 <= target < num_ids):
            raise ValueError(f"copy {source} -> {target} leaves the {num_ids} block ids of this group.")
    if uses_triton(blocks) and _is_rows_of_words(blocks):
        from transom_kernels.block_copy.gpu import copy_blocks_triton

        for run in _independent_runs(pairs, most=len(pairs), staged=False):
            copy_blocks_triton(blocks, blocks, run)
        return
    block_bytes = blocks[0].numel() * blocks.element_size() if pairs else 1
    for run in _independent_runs(pairs, most=max(1, STAGED_BYTES // block_bytes), staged=True):
        sources = torch.tensor([source for source, _ in run], device=blocks.device)
        targets = torch.tensor([target for _, target in run], device=blocks.device)
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def _is_rows_of_words(blocks: torch.Tensor) -> bool:
    return blocks.dtype == torch.uint8 and blocks.dim() == 2 and blocks.stride(1) == 1 and not blocks.shape[1] % 4


def _independent_runs(pairs: Sequence[tuple[int, int]], *, most: int, staged: bool) -> list[list[tuple[int, int]]]:
    """Cut the list wherever a copy reads or writes what an earlier copy of its run wrote: a run can go at once.

    A later copy may overwrite what an earlier one of its run reads only if all are read first (`staged`). At most `most` are in
    a run.
    """
    runs: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        waits = source in written or target in written or (not staged and target in read)
        if not runs or len(runs[-1]) == most or waits:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((source, target))
        read.add(source)
        written.add(target)
    return runs
