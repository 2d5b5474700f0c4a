"""One block copy after the other: the specification of `block_copy` and `block_copy_between`."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def block_copy_reference(blocks: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """The contract is that of `op.block_copy`."""
    for source, target in pairs:
        blocks[target] = blocks[source].clone()


def block_copy_between_reference(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """The contract is that of `op.block_copy_between`."""
    for from_id, to_id in pairs:
        target[to_id] = source[from_id].to(target.device)
