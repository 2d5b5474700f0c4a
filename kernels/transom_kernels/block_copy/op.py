"""`block_copy`: copy whole blocks, in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    block_bytes = blocks[0].numel() * blocks.element_size() if pairs else 1
    for run in _independent_runs(pairs, max(1, STAGED_BYTES // block_bytes)):
        sources = torch.tensor([source for source, _ in run], device=blocks.device)
        targets = torch.tensor([target for _, target in run], device=blocks.device)
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def _independent_runs(pairs: Sequence[tuple[int, int]], most: int) -> list[list[tuple[int, int]]]:
    """Cut the list wherever a copy reads or writes what an earlier copy of its run wrote: a run can go at once.

    A later copy may overwrite what an earlier one of its run reads, since all are read first. At most `most` are in a run.
    """
    runs: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for source, target in pairs:
        if not runs or len(runs[-1]) == most or source in written or target in written:
            runs.append([])
            written = set()
        runs[-1].append((source, target))
        written.add(target)
    return runs
