"""How the CPU path cuts a batch into tiles. Integers only; computed once a step, per group and mask.

A *dense* tile is `n` sequences of `R` query rows each against keys gathered block by block, padded to the longest: decoding
sequences of like length together (R = 1), or a piece of a prompt whose mask is not plainly causal (n = 1). A *causal* tile is
a whole prompt chunk whose rows all see everything from one key on, which needs no mask. Rows that see nothing are *blind*.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.rule import MaskRule

PIECE_ROWS = 128  # rows of a dense prompt piece: the mask's waste against the number of calls
PADDING_BLOCKS = 32  # a tile of its own costs about as much as gathering this many blocks
TILE_BLOCKS = 2048  # bounds the buffer that a tile is gathered into; larger tiles are no faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Rows [row, row + count) of the batch at positions from `start`, of sequence `b`, and the logical blocks they read."""

    b: int
    row: int
    count: int
    start: int
    sink_blocks: int  # blocks [0, sink_blocks) hold sink tokens that lie before `first_block`
    first_block: int
    end_block: int

    @property
    def num_blocks(self) -> int:
        """Blocks to gather."""
        return self.sink_blocks + self.end_block - self.first_block


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalChunk:
    """Rows [row, row + count) that see all keys from `first_key` to themselves; the first is at position `start`."""

    b: int
    row: int
    count: int
    start: int
    first_key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Every row of the batch is in one tile or blind."""

    dense: tuple[tuple[Reader, ...], ...]
    causal: tuple[CausalChunk, ...]
    blind_rows: tuple[int, ...]


def plan_tiles(batch: PagedBatch, rule: MaskRule, *, allow_causal: bool) -> TilePlan:
    """Cut the batch; `allow_causal` False makes all tiles dense."""
    decoding: list[Reader] = []
    pieces: list[Reader] = []
    causal: list[CausalChunk] = []
    blind_rows: list[int] = []
    row = 0
    for b, count in enumerate(batch.count_host):
        start, attend_from = batch.start_host[b], batch.attend_from_host[b]
        blind = 0 if rule.num_sink_tokens else min(max(attend_from - start, 0), count)
        blind_rows.extend(range(row, row + blind))
        first, rows, seen = start + blind, count - blind, row + blind
        if rows == 1:
            decoding.append(_reader(batch, rule, b, seen, 1, first))
        elif rows and allow_causal and _is_causal(rule, first, rows, attend_from):
            low = 0 if rule.num_sink_tokens else rule.lower(first, attend_from)
            causal.append(CausalChunk(b=b, row=seen, count=rows, start=first, first_key=low))
        else:
            for done in range(0, rows, PIECE_ROWS):
                size = min(PIECE_ROWS, rows - done)
                pieces.append(_reader(batch, rule, b, seen + done, size, first + done))
        row += count
    dense = (*_bucket(decoding), *((piece,) for piece in pieces))
    return TilePlan(dense=dense, causal=tuple(causal), blind_rows=tuple(blind_rows))


def _is_causal(rule: MaskRule, first: int, rows: int, attend_from: int) -> bool:
    """Whether all rows see one run of keys that starts at the same key."""
    low = rule.lower(first, attend_from)
    return rule.lower(first + rows - 1, attend_from) == low and (
        not rule.num_sink_tokens or low <= rule.num_sink_tokens
    )


def _reader(batch: PagedBatch, rule: MaskRule, b: int, row: int, count: int, start: int) -> Reader:
    size = batch.block_size
    end = start + count
    low = min(rule.lower(start, batch.attend_from_host[b]), end - 1)
    first_block = low // size
    sink_blocks = min(-(-min(rule.num_sink_tokens, end) // size), first_block)
    return Reader(
        b=b,
        row=row,
        count=count,
        start=start,
        sink_blocks=sink_blocks,
        first_block=first_block,
        end_block=-(-end // size),
    )


def _bucket(readers: list[Reader]) -> list[tuple[Reader, ...]]:
    """Group by length, within `PADDING_BLOCKS` and `TILE_BLOCKS` a tile; inside a tile in order of rows."""
    buckets: list[list[Reader]] = []
    padding = 0
    for reader in sorted(readers, key=lambda r: -r.num_blocks):
        if buckets:
            padding += buckets[-1][0].num_blocks - reader.num_blocks
        if not buckets or padding > PADDING_BLOCKS or (len(buckets[-1]) + 1) * buckets[-1][0].num_blocks > TILE_BLOCKS:
            buckets.append([])
            padding = 0
        buckets[-1].append(reader)
    return [tuple(sorted(bucket, key=lambda r: r.row)) for bucket in buckets]
