"""Plans the programs of the Triton kernels on the host: turns a batch into an array of work items, one for each program.

The plan is made once a step for each KV cache group and mask rule. Terms:

- A *tile* is a group of query tokens of one sequence together with all query heads that share one KV head.
- A *work item* is what one program of the `attend` kernel computes: a tile, or one *split* of a tile's keys (split-KV, as in
  FlashDecoding). `Tiling.num_splits` chooses how many, so that one long sequence alone fills the device's multiprocessors.
- The *partial result* of a query token in a split is its maximum score, its softmax sum and its weighted values, for each query
  head. The `combine` kernel merges the partial results of a tile; a *combine item* names a tile that was split.
- A *table index* is a key's place in the block table: column * P + offset in the block. Indices [0, sinks_end) hold sink tokens;
  the *run* [run_begin, run_end) holds the other keys that the tile's queries see.

Tiles and splits of a sequence depend on that sequence alone (its keys and its new tokens), so its result does not depend on the
rest of the batch. Splits end at multiples of `Tiling.split_unit` table indices.

Fields of a work item (int32):

    0 row          first row of the tile in the batch's queries
    1 tokens       query tokens of the tile; 0: the program does nothing
    2 position     position of the tile's first query
    3 sequence     number of the sequence in the batch
    4 unused       always 0
    5 sinks_end    end of the sink tokens' table indices; 0 in all splits but a tile's first
    6 run_begin    first table index of the run that this item reads
    7 run_end      end of the run that this item reads
    8 partial      number of its first token's partial result, or NO_PARTIAL: the item writes the final result

Fields of a combine item (int32): 0 row, 1 tokens, 2 number of the first partial result, 3 number of splits; a split's partial
results follow those of the split before it.

Example: one sequence decodes at position 2,500 without a window, 64 KV heads, 132 multiprocessors, unit 32. Two splits fill 128
multiprocessors, so its tile of 2,501 keys becomes two work items with runs [0, 1280) and [1280, 2501), partials 0 and 1, and one
combine item (row 0, 1 token, partials 0 and 1).

Legend: W work items, J combine items, P block size in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.inputs import HostBatch
from transom_kernels.paged_attention.rule import Integers, MaskRule

ITEM_FIELDS = 9  # of a work item; the table above names them
NO_LIMIT = 2**31 - 1  # of a tiling's new tokens
NO_PARTIAL = -1  # in field 8: the item's result is final
WHOLE_UNITS = 8  # tiles with up to this many units of keys are not split; longer splits end at multiples of two units
# The shortest split, in half units, for each tile of the sequence: the partial results of a split cost as much as some keys.
# Several tiles need fewer splits to fill the device, but from eight tiles on the cost is made up for.
LEAST_HALF_UNITS, MOST_COUNTED_TILES = 5, 8
# A sequence's programs fill up to so many waves of all multiprocessors, and the least number that fills this share of its waves.
MOST_WAVES, FILLED = 6, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The way in which sequences with `min_new_tokens` to `max_new_tokens` new tokens are cut into work items.

    A tile has `tile_tokens` query tokens. Splits of its keys end at multiples of `split_unit`, as many as fill a device's
    `multiprocessors` with programs for each of the `kv_heads`.
    """

    min_new_tokens: int
    max_new_tokens: int
    tile_tokens: int
    split_unit: int
    kv_heads: int
    multiprocessors: int

    @property
    def is_for_prompts(self) -> bool:
        """Whether it is the tiling of many new tokens, which takes the padding of mixed steps as well."""
        return self.max_new_tokens == NO_LIMIT

    def num_splits(self, tiles: int | Integers, keys: int | Integers) -> Integers:
        """Return the most splits of each tile of sequences with this many tiles, the largest of which reads `keys` keys."""
        counts = [1] if self.max_new_tokens <= self.tile_tokens else np.atleast_1d(tiles).tolist()
        filling = np.array([filling_splits(n * self.kv_heads, self.multiprocessors) for n in counts], dtype=np.int64)
        least = LEAST_HALF_UNITS * self.split_unit * np.minimum(tiles, MOST_COUNTED_TILES)
        found = np.maximum(1, np.minimum(filling, 2 * np.asarray(keys) // least))
        return np.where(np.asarray(keys) <= WHOLE_UNITS * self.split_unit, 1, found)


@cache
def filling_splits(programs: int, multiprocessors: int) -> int:
    """Return how many splits of each of some programs fill the waves of a device well; see `FILLED`."""
    best = (0.0, 1)
    for waves in range(1, MOST_WAVES + 1):
        splits = waves * multiprocessors // programs
        best = max(best, (splits * programs / (waves * multiprocessors), splits), key=lambda found: found[0])
        if best[0] >= FILLED:
            break
    return best[1]


@dataclass(slots=True, kw_only=True)
class Work:
    """The work items of one launch and the combine items of its split tiles, on the device."""

    items: torch.Tensor  # [W, ITEM_FIELDS] int32
    combine_items: torch.Tensor  # [J, 4] int32
    num_partials: int  # for each of them, every query head has a partial result


@dataclass(slots=True, kw_only=True)
class WorkPlan:
    """`Work` on the host, before it is copied to the device."""

    items: NDArray[np.int32]  # [W, ITEM_FIELDS]
    combine_items: NDArray[np.int32]  # [J, 4]
    num_partials: int

    def on(self, device: torch.device) -> Work:
        """Copy the plan to a device."""
        return Work(
            items=torch.from_numpy(self.items).to(device, non_blocking=True),
            combine_items=torch.from_numpy(self.combine_items).to(device, non_blocking=True),
            num_partials=self.num_partials,
        )

    def parts(self, most_partials: int) -> list[WorkPlan]:
        """Cut the plan into plans with at most `most_partials` partial results each; a tile is not cut."""
        if self.num_partials <= most_partials:
            return [self]
        partial, first = self.items[:, 8], self.combine_items[:, 2]
        sizes = self.combine_items[:, 1] * self.combine_items[:, 3]
        # A part begins at the first tile from a multiple of `step` on, so it is longer than that by a tile at most.
        step = max(1, most_partials - int(sizes.max()))
        edges = [*first[np.diff(first // step, prepend=-1) > 0].tolist(), self.num_partials]
        parts = []
        for begin, end in pairwise(edges):
            is_own = (partial >= begin) & (partial < end)
            items = self.items[is_own if begin else is_own | (partial == NO_PARTIAL)].copy()
            items[items[:, 8] != NO_PARTIAL, 8] -= begin
            combine_items = self.combine_items[(first >= begin) & (first < end)].copy()
            combine_items[:, 2] -= begin
            parts.append(WorkPlan(items=items, combine_items=combine_items, num_partials=end - begin))
        return parts

    def write(self, items: NDArray[np.int32], combine_items: NDArray[np.int32]) -> None:
        """Write the plan into arrays of fixed size, which a CUDA graph reads in each replay. Unused items get 0 tokens.

        Raises:
            ValueError: the arrays are too short.
        """
        num_items, num_combine_items = len(self.items), len(self.combine_items)
        if num_items > len(items) or num_combine_items > len(combine_items):
            raise ValueError(
                f"{num_items} work items and {num_combine_items} combine items do not fit arrays of {len(items)} and "
                f"{len(combine_items)}."
            )
        items[:num_items], combine_items[:num_combine_items] = self.items, self.combine_items
        items[num_items:] = (*(0,) * (ITEM_FIELDS - 1), NO_PARTIAL)
        combine_items[num_combine_items:] = 0


@dataclass(slots=True, kw_only=True)
class _Tiles:
    """The tiles of a batch; each field has one number per tile. The table of fields in the module docstring defines them."""

    sequence: Integers
    row: Integers
    tokens: Integers
    position: Integers
    sinks_end: Integers
    run_begin: Integers
    run_end: Integers


def plan_work(batch: HostBatch, rule: MaskRule, tiling: Tiling) -> WorkPlan:
    """Return the work items of those sequences that the tiling is for, those with the most keys first.

    Programs start in the order of items: if the longest started last, most of the device would be idle until it ends. The empty
    items that fill a CUDA graph's array come after them.
    """
    tiles = _tiles(batch, rule, tiling)
    tile, split, begin, end = _splits(tiles, tiling)
    num_splits = np.bincount(tile, minlength=len(tiles.row))
    is_split = num_splits > 1
    num_partials = np.where(is_split, num_splits, 0) * tiles.tokens
    first_partial = np.cumsum(num_partials) - num_partials
    partial = np.where(is_split[tile], first_partial[tile] + split * tiles.tokens[tile], NO_PARTIAL)
    sinks_end = np.where(split == 0, tiles.sinks_end[tile], 0)  # a tile's first split reads the sink tokens
    items = (
        tiles.row[tile],
        tiles.tokens[tile],
        tiles.position[tile],
        tiles.sequence[tile],
        0 * tile,
        sinks_end,
        begin,
        end,
        partial,
    )
    return WorkPlan(
        items=_stack_columns(items)[np.argsort(begin - end, kind="stable")],
        combine_items=_stack_columns(
            [column[is_split] for column in (tiles.row, tiles.tokens, first_partial, num_splits)]
        ),
        num_partials=int(num_partials.sum()),
    )


def _tiles(batch: HostBatch, rule: MaskRule, tiling: Tiling) -> _Tiles:
    """Return the tiles of those sequences that the tiling is for, and the table indices that the queries of each tile see."""
    count = np.array(batch.count_host, dtype=np.int64)
    # the sequences of this tiling, and each tile's query tokens
    is_tiled = (count >= tiling.min_new_tokens) & (count <= tiling.max_new_tokens)
    per_sequence = np.where(is_tiled, -(-count // tiling.tile_tokens), 0)
    b = np.repeat(np.arange(len(count)), per_sequence)
    done = (np.arange(len(b)) - (np.cumsum(per_sequence) - per_sequence)[b]) * tiling.tile_tokens
    tokens = np.minimum(tiling.tile_tokens, count[b] - done)
    position = np.array(batch.start_host, dtype=np.int64)[b] + done
    # the run holds the positions [low, end); `shift` leads from positions to table indices, where the run follows the sink blocks
    end, run_offset = position + tokens, batch.num_sink_blocks * batch.block_size
    shift = run_offset - np.array(batch.first_block_host, dtype=np.int64)[b] * batch.block_size
    sinks_end = np.minimum(rule.num_sink_tokens, end)
    first_key = rule.first_keys(position, np.array(batch.attend_from_host, dtype=np.int64)[b])
    low = np.minimum(np.maximum(sinks_end, first_key), end)
    run_begin = np.where(low < run_offset, low, np.maximum(low + shift, run_offset))
    run_end = np.where(end <= run_offset, end, end + shift)
    return _Tiles(
        sequence=b,
        row=(np.cumsum(count) - count)[b] + done,
        tokens=tokens,
        position=position,
        sinks_end=sinks_end,
        run_begin=run_begin,
        run_end=np.maximum(run_begin, run_end),
    )


def _splits(tiles: _Tiles, tiling: Tiling) -> tuple[Integers, Integers, Integers, Integers]:
    """Return each split's tile, its number within the tile, and the table indices [begin, end) of its run.

    All splits of a sequence are about equally long: its tiles have the same number of splits, that of its largest tile.
    """
    unit = tiling.split_unit
    base = tiles.run_begin // unit * unit
    keys = tiles.run_end - base
    most_keys, num_tiles = keys, np.ones_like(keys)
    if tiling.max_new_tokens > tiling.tile_tokens and len(keys):
        first = np.flatnonzero(np.diff(tiles.sequence, prepend=-1))
        num_tiles = np.diff(np.append(first, len(keys)))
        most_keys, num_tiles = (np.repeat(of, num_tiles) for of in (np.maximum.reduceat(keys, first), num_tiles))
    wanted = tiling.num_splits(num_tiles, most_keys)
    multiple = unit * (1 + (most_keys >= WHOLE_UNITS * unit * wanted))
    length = np.maximum(1, -(-keys // (wanted * multiple))) * multiple
    num_splits = np.maximum(1, -(-keys // length))
    tile = np.repeat(np.arange(len(num_splits)), num_splits)
    split = np.arange(len(tile)) - (np.cumsum(num_splits) - num_splits)[tile]
    edge = base[tile] + split * length[tile]
    begin = np.maximum(edge, tiles.run_begin[tile])
    return tile, split, begin, np.minimum(edge + length[tile], tiles.run_end[tile])


def _stack_columns(columns: Sequence[Integers]) -> NDArray[np.int32]:
    """Return an array with one row per item and one column per field."""
    return np.stack(columns, axis=1).astype(np.int32)
