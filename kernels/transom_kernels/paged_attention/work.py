"""How the Triton path cuts a batch into programs. Integers only; computed once a step, per group and mask.

A tile is some query tokens of one sequence with all query heads of one KV head; it reads table columns, first those that hold sink
tokens, then a run. Tiles of few tokens (decoding) are cut along the keys into splits of a fixed size, so that one long sequence
fills the device; how a sequence is cut depends on nothing but itself, so its result does not depend on the rest of the batch.

Legend: W programs per KV head, a slot is a key's place in column order: column * P + offset, P block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.batch import HostBatch
from transom_kernels.paged_attention.rule import Integers, MaskRule

FIELDS = 9  # of an item: row, tokens, position, sequence, first and last slot of sinks and of the run, partial result
NO_PARTIAL = -1


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
    combine_items: torch.Tensor  # [J, 4] int32: row, tokens, first partial, number of partials
    num_partials: int


@dataclass(slots=True, kw_only=True)
class WorkPlan:
    """`Work` while it is on the host."""

    items: NDArray[np.int32]  # [W, FIELDS]
    combine_items: NDArray[np.int32]  # [J, 4]
    num_partials: int

    def on(self, device: torch.device) -> Work:
        """The same for the programs."""
        return Work(
            items=torch.from_numpy(self.items).to(device, non_blocking=True),
            combine_items=torch.from_numpy(self.combine_items).to(device, non_blocking=True),
            num_partials=self.num_partials,
        )

    def write(self, items: NDArray[np.int32], combine_items: NDArray[np.int32]) -> None:
        """Fill lists that steps share, as a CUDA graph needs: what is left over in them has no tokens and does nothing.

        Raises:
            ValueError: they are too short.
        """
        num_items, num_combine_items = len(self.items), len(self.combine_items)
        if num_items > len(items) or num_combine_items > len(combine_items):
            raise ValueError(
                f"{num_items} work items and {num_combine_items} combine items do not fit arrays of {len(items)} and "
                f"{len(combine_items)}."
            )
        items[:num_items], combine_items[:num_combine_items] = self.items, self.combine_items
        items[num_items:] = (*(0,) * (FIELDS - 1), NO_PARTIAL)
        combine_items[num_combine_items:] = 0


@dataclass(slots=True, kw_only=True)
class _Tiles:
    """Tiles of a batch, a number each."""

    sequence: Integers
    row: Integers
    tokens: Integers
    position: Integers
    sinks_end: Integers
    begin_slot: Integers
    end_slot: Integers


def plan_work(batch: HostBatch, rule: MaskRule, tiling: Tiling) -> WorkPlan:
    """The programs of those sequences that the tiling is for: by sequence, tile and split.

    Those of tiles that are not cut are in reverse, since programs begin in their order: a prompt's last tile has the most keys, and
    the device would be half idle while it alone runs on. Splits are alike; what fills up a longer list stays behind them.
    """
    tiles = _tiles(batch, rule, tiling)
    of, cut, begin, end = _splits(tiles, tiling.split_keys)
    num_cuts = np.bincount(of, minlength=len(tiles.row))
    is_split = num_cuts > 1
    is_part = is_split[of]
    partial = np.where(is_part, np.cumsum(is_part) - 1, NO_PARTIAL)
    sinks_end = np.where(cut == 0, tiles.sinks_end[of], 0)  # the first split has them
    items = (
        tiles.row[of],
        tiles.tokens[of],
        tiles.position[of],
        tiles.sequence[of],
        0 * of,
        sinks_end,
        begin,
        end,
        partial,
    )
    combine_items = (tiles.row, tiles.tokens, np.cumsum(num_cuts * is_split) - num_cuts, num_cuts)
    programs = _stack_columns(items)
    return WorkPlan(
        items=programs if tiling.split_keys else programs[::-1].copy(),
        combine_items=_stack_columns([column[is_split] for column in combine_items]),
        num_partials=int(is_part.sum()),
    )


def _tiles(batch: HostBatch, rule: MaskRule, tiling: Tiling) -> _Tiles:
    """Each tile's slots: of sink tokens `[0, sinks_end)`, and of the run behind them that some query of it sees."""
    count = np.array(batch.count_host, dtype=np.int64)
    mine = (count >= tiling.least) & (count <= tiling.most)
    per_sequence = np.where(mine, -(-count // tiling.tile_tokens), 0)
    b = np.repeat(np.arange(len(count)), per_sequence)
    done = (np.arange(len(b)) - (np.cumsum(per_sequence) - per_sequence)[b]) * tiling.tile_tokens
    tokens = np.minimum(tiling.tile_tokens, count[b] - done)
    position = np.array(batch.start_host, dtype=np.int64)[b] + done
    end, pinned_end = position + tokens, batch.num_sink_blocks * batch.block_size
    shift = pinned_end - np.array(batch.first_block_host, dtype=np.int64)[b] * batch.block_size
    sinks_end = np.minimum(rule.num_sink_tokens, end)
    lower = rule.lowers(position, np.array(batch.attend_from_host, dtype=np.int64)[b])
    low = np.minimum(np.maximum(sinks_end, lower), end)
    begin_slot = np.where(low < pinned_end, low, np.maximum(low + shift, pinned_end))
    end_slot = np.where(end <= pinned_end, end, end + shift)
    return _Tiles(
        sequence=b,
        row=(np.cumsum(count) - count)[b] + done,
        tokens=tokens,
        position=position,
        sinks_end=sinks_end,
        begin_slot=begin_slot,
        end_slot=np.maximum(begin_slot, end_slot),
    )


def _splits(tiles: _Tiles, split_keys: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Tile, number within the tile, first and last slot of each split.

    Runs are cut at multiples of `split_keys`, so that a sequence that grows keeps its cuts; 0 leaves them whole.
    """
    if not split_keys:
        of = np.arange(len(tiles.row))
        return of, 0 * of, tiles.begin_slot, tiles.end_slot
    first = tiles.begin_slot // split_keys
    num_cuts = np.maximum(1, -(-tiles.end_slot // split_keys) - first)
    of = np.repeat(np.arange(len(num_cuts)), num_cuts)
    cut = np.arange(len(of)) - (np.cumsum(num_cuts) - num_cuts)[of]
    edge = (first[of] + cut) * split_keys
    begin = np.maximum(edge, tiles.begin_slot[of])
    return of, cut, begin, np.minimum(edge + split_keys, tiles.end_slot[of])


def _stack_columns(columns: Sequence[Integers]) -> NDArray[np.int32]:
    return np.stack(columns, axis=1).astype(np.int32)
