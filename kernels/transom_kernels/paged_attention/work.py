"""How the Triton path cuts a batch into programs. Integers only; computed once a step, per group and mask.

A tile is some query tokens of one sequence with all query heads of one KV head; it reads table columns, first those that hold sink
tokens, then a run. Tiles of few tokens (decoding) are cut along the keys into splits of a fixed size, so that one long sequence
fills the device; how a sequence is cut depends on nothing but itself, so its result does not depend on the rest of the batch.

Legend: W programs per KV head, a slot is a key's place in column order: column * P + offset, P block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.rule import MaskRule

FIELDS = 9  # of an item: row, tokens, position, sequence, first and last slot of sinks and of the run, partial result
NO_PARTIAL = -1

Item = tuple[int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Sequences with `least` to `most` new tokens, in tiles of `tile_tokens`, cut into splits of `split_keys` keys (0: not)."""

    least: int
    most: int
    tile_tokens: int
    split_keys: int


@dataclass(slots=True, kw_only=True)
class Work:
    """Programs, and the tiles whose partial results have to be joined: rows [row, row + tokens) from `count` partials on."""

    items: torch.Tensor  # [W, FIELDS] int32
    joins: torch.Tensor  # [J, 4] int32: row, tokens, first partial, number of partials
    num_partials: int

    def padded(self, *, num_items: int, num_joins: int, num_partials: int) -> Work:
        """The same in a shape that steps can share, as a CUDA graph needs: what is added has no tokens and does nothing.

        Raises:
            ValueError: it is larger than that.
        """
        more = (num_items - len(self.items), num_joins - len(self.joins), num_partials - self.num_partials)
        if min(more) < 0:
            raise ValueError(
                f"{len(self.items)} items, {len(self.joins)} joins and {self.num_partials} partial results do not fit a shape of "
                f"{num_items}, {num_joins} and {num_partials}."
            )
        empty = self.items.new_tensor([[0] * (FIELDS - 1) + [NO_PARTIAL]]).expand(more[0], -1)
        return Work(
            items=torch.cat([self.items, empty]),
            joins=torch.cat([self.joins, self.joins.new_zeros(more[1], 4)]),
            num_partials=num_partials,
        )


def plan_work(batch: PagedBatch, rule: MaskRule, tiling: Tiling, device: torch.device) -> Work:
    """The programs of those sequences that the tiling is for."""
    items: list[Item] = []
    joins: list[tuple[int, int, int, int]] = []
    num_partials, row = 0, 0
    for b, count in enumerate(batch.count_host):
        mine = tiling.least <= count <= tiling.most
        for done in range(0, count if mine else 0, tiling.tile_tokens):
            tokens = min(tiling.tile_tokens, count - done)
            position = batch.start_host[b] + done
            sinks, run = _slots(batch, rule, b, position, tokens)
            cuts = _cut(run, tiling.split_keys) if tiling.split_keys else [run]
            if len(cuts) > 1:
                joins.append((row + done, tokens, num_partials, len(cuts)))
            for begin, end in cuts:
                partial = num_partials if len(cuts) > 1 else NO_PARTIAL
                num_partials += len(cuts) > 1
                items.append((row + done, tokens, position, b, *sinks, begin, end, partial))
                sinks = (0, 0)  # the first split has them
        row += count
    return Work(items=_tensor(items, FIELDS, device), joins=_tensor(joins, 4, device), num_partials=num_partials)


def _slots(
    batch: PagedBatch, rule: MaskRule, b: int, position: int, tokens: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Slots [begin, end) of sink tokens, and of the run behind them, that some query of a tile sees."""
    size, pinned = batch.block_size, batch.num_pinned_blocks
    shift = (pinned - batch.first_block_host[b]) * size
    end = position + tokens
    sinks_end = min(rule.num_sink_tokens, end)
    low = min(max(sinks_end, rule.lower(position, batch.attend_from_host[b])), end)
    pinned_end = pinned * size
    begin_slot = low if low < pinned_end else max(low + shift, pinned_end)
    end_slot = end if end <= pinned_end else end + shift
    return (0, sinks_end), (begin_slot, max(begin_slot, end_slot))


def _cut(run: tuple[int, int], split_keys: int) -> list[tuple[int, int]]:
    """At multiples of `split_keys`, so that a sequence that grows keeps its cuts."""
    begin, end = run
    edges = [begin, *range((begin // split_keys + 1) * split_keys, end, split_keys), end]
    return list(pairwise(edges))


def _tensor(rows: list[Item] | list[tuple[int, int, int, int]], width: int, device: torch.device) -> torch.Tensor:
    array: NDArray[np.int32] = np.array(rows, dtype=np.int32).reshape(-1, width)
    return torch.from_numpy(array).to(device, non_blocking=True)
