"""Plans the programs of the Triton kernels on the host: turns a batch into an array of work items, one for each program.

The plan is made once a step for each KV cache group and mask rule. Terms:

- A *tile* is a group of query tokens of one sequence together with all query heads that share one KV head.
- A *work item* is what one program of the `attend` kernel computes: a tile, or one *split* of a tile's keys (split-KV, as in
  FlashDecoding). Tiles of few tokens (decoding) are split at multiples of `split_keys`, so that one long sequence fills the device.
- The *partial result* of a split is its maximum score, its softmax sum and its weighted values. The `combine` kernel merges the
  partial results of a tile; a *combine item* names a tile that was split.
- A *table index* is a key's place in the block table: column * P + offset in the block. Indices [0, sinks_end) hold sink tokens;
  the *run* [run_begin, run_end) holds the other keys that the tile's queries see.

Tiles and splits of a sequence depend on that sequence alone, so its result does not depend on the rest of the batch.

Fields of a work item (int32):

    0 row          first row of the tile in the batch's queries
    1 tokens       query tokens of the tile; 0: the program does nothing
    2 position     position of the tile's first query
    3 sequence     number of the sequence in the batch
    4 sinks_begin  always 0
    5 sinks_end    end of the sink tokens' table indices; 0 in all splits but a tile's first
    6 run_begin    first table index of the run that this item reads
    7 run_end      end of the run that this item reads
    8 partial      number of the partial result to write, or NO_PARTIAL: the item writes the final result

Fields of a combine item (int32): 0 row, 1 tokens, 2 number of the first partial result, 3 number of partial results.

Example: one sequence decodes at position 2,500 without a window, `split_keys` 1024. Its tile has 2,501 keys and becomes three work
items with runs [0, 1024), [1024, 2048) and [2048, 2501), partials 0, 1 and 2, and one combine item (row 0, 1 token, partials 0 to
2).

Legend: W work items, J combine items, P block size in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from transom_kernels.paged_attention.inputs import HostBatch
from transom_kernels.paged_attention.rule import Integers, MaskRule

ITEM_FIELDS = 9  # of a work item; the table above names them
NO_PARTIAL = -1  # in field 8: the item's result is final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The way in which sequences with `min_new_tokens` to `max_new_tokens` new tokens are cut into work items.

    A tile has `tile_tokens` query tokens, and its keys are split at multiples of `split_keys`; 0: tiles are not split.
    """

    min_new_tokens: int
    max_new_tokens: int
    tile_tokens: int
    split_keys: int


@dataclass(slots=True, kw_only=True)
class Work:
    """The work items of one launch and the combine items of its split tiles, on the device."""

    items: torch.Tensor  # [W, ITEM_FIELDS] int32
    combine_items: torch.Tensor  # [J, 4] int32
    num_partials: int


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
    """Return the work items of those sequences that the tiling is for, ordered by sequence, tile and split.

    If tiles are not split, items come in reverse order. Programs start in the order of items, and the last tile of a prompt has
    the most keys: if it started last, most of the device would be idle until it ends. Splits are equally long, so they keep their
    order, and the empty items that fill a CUDA graph's array come after them.
    """
    tiles = _tiles(batch, rule, tiling)
    tile, split, begin, end = _splits(tiles, tiling.split_keys)
    num_splits = np.bincount(tile, minlength=len(tiles.row))
    is_split = num_splits > 1
    is_partial = is_split[tile]
    partial = np.where(is_partial, np.cumsum(is_partial) - 1, NO_PARTIAL)
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
    combine_items = (tiles.row, tiles.tokens, np.cumsum(num_splits * is_split) - num_splits, num_splits)
    rows = _stack_columns(items)
    return WorkPlan(
        items=rows if tiling.split_keys else rows[::-1].copy(),
        combine_items=_stack_columns([column[is_split] for column in combine_items]),
        num_partials=int(is_partial.sum()),
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


def _splits(tiles: _Tiles, split_keys: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Return each split's tile, its number within the tile, and the table indices [begin, end) of its run.

    Runs are split at multiples of `split_keys`, so that a growing sequence keeps its splits; 0 leaves runs whole.
    """
    if not split_keys:
        tile = np.arange(len(tiles.row))
        return tile, 0 * tile, tiles.run_begin, tiles.run_end
    first = tiles.run_begin // split_keys
    num_splits = np.maximum(1, -(-tiles.run_end // split_keys) - first)
    tile = np.repeat(np.arange(len(num_splits)), num_splits)
    split = np.arange(len(tile)) - (np.cumsum(num_splits) - num_splits)[tile]
    edge = (first[tile] + split) * split_keys
    begin = np.maximum(edge, tiles.run_begin[tile])
    return tile, split, begin, np.minimum(edge + split_keys, tiles.run_end[tile])


def _stack_columns(columns: Sequence[Integers]) -> NDArray[np.int32]:
    """Return an array with one row per item and one column per field."""
    return np.stack(columns, axis=1).astype(np.int32)
