"""Plans how the CPU implementation cuts a batch's query rows into tiles. Integers only; once a step for each group and mask rule.

- A *dense tile* multiplies `n` sequences of `R` query rows each with keys that are gathered block by block and padded to the
  longest sequence. It holds decoding sequences of similar lengths (R = 1), or one piece of a prompt whose mask is not plainly
  causal (n = 1).
- A *causal tile* is a whole prompt chunk whose rows all see every key from one key on, up to themselves. It needs no mask.
- A *keyless row* sees no key at all; its result is zero.

Example: without a window, sequences with contexts of 20, 21 and 900 blocks decode beside a prompt chunk of 300 tokens. The first
two sequences share a dense tile, the third gets its own, and the prompt is one causal tile. With a window of 128 tokens the prompt
becomes dense tiles of 128, 128 and 44 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.paged_attention.rule import MaskRule

PIECE_ROWS = 128  # rows of a dense prompt piece: more rows multiply more masked keys, fewer rows make more calls
PADDING_BLOCKS = 32  # padding of a tile, in blocks: an additional tile costs about as much as gathering this many
TILE_BLOCKS = 2048  # blocks of a tile: bounds the buffer that it is gathered into; larger tiles are not faster


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRows:
    """Rows [row, row + count) of the batch: queries of sequence `b` at positions from `start`, and the logical blocks they read.

    They read the blocks [0, sink_blocks) for sink tokens and then [first_block, end_block).
    """

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
    """Rows [row, row + count) of sequence `b` that see all keys from `first_key` to themselves; the first is at position
    `start`.
    """

    b: int
    row: int
    count: int
    start: int
    first_key: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """The tiles of a batch. Every row of the batch is in exactly one tile or is a keyless row."""

    dense: tuple[tuple[QueryRows, ...], ...]
    causal: tuple[CausalChunk, ...]
    keyless_rows: tuple[int, ...]


def plan_tiles(batch: PagedBatch, rule: MaskRule, *, allow_causal: bool) -> TilePlan:
    """Plan the tiles of a batch; with `allow_causal` False all tiles are dense."""
    decoding: list[QueryRows] = []
    pieces: list[QueryRows] = []
    causal: list[CausalChunk] = []
    keyless_rows: list[int] = []
    row = 0
    for b, count in enumerate(batch.count_host):
        start, attend_from = batch.start_host[b], batch.attend_from_host[b]
        num_keyless = 0 if rule.num_sink_tokens else min(max(attend_from - start, 0), count)
        keyless_rows.extend(range(row, row + num_keyless))
        first, rows, first_row = start + num_keyless, count - num_keyless, row + num_keyless
        if rows == 1:
            decoding.append(_query_rows(batch, rule, b, first_row, 1, first))
        elif rows and allow_causal and _is_causal(rule, first, rows, attend_from):
            low = 0 if rule.num_sink_tokens else rule.first_key(first, attend_from)
            causal.append(CausalChunk(b=b, row=first_row, count=rows, start=first, first_key=low))
        else:
            for done in range(0, rows, PIECE_ROWS):
                size = min(PIECE_ROWS, rows - done)
                pieces.append(_query_rows(batch, rule, b, first_row + done, size, first + done))
        row += count
    dense = (*_bucket(decoding), *((piece,) for piece in pieces))
    return TilePlan(dense=dense, causal=tuple(causal), keyless_rows=tuple(keyless_rows))


def _is_causal(rule: MaskRule, first: int, rows: int, attend_from: int) -> bool:
    """Whether all rows see one run of keys that begins at an equal key."""
    low = rule.first_key(first, attend_from)
    return rule.first_key(first + rows - 1, attend_from) == low and (
        not rule.num_sink_tokens or low <= rule.num_sink_tokens
    )


def _query_rows(batch: PagedBatch, rule: MaskRule, b: int, row: int, count: int, start: int) -> QueryRows:
    """`count` rows of sequence `b` at positions from `start`, and the blocks that hold the keys they see."""
    size = batch.block_size
    end = start + count
    low = min(rule.first_key(start, batch.attend_from_host[b]), end - 1)
    first_block = low // size
    sink_blocks = min(-(-min(rule.num_sink_tokens, end) // size), first_block)
    return QueryRows(
        b=b,
        row=row,
        count=count,
        start=start,
        sink_blocks=sink_blocks,
        first_block=first_block,
        end_block=-(-end // size),
    )


def _bucket(decoding: list[QueryRows]) -> list[tuple[QueryRows, ...]]:
    """Group decoding sequences by length, with at most `PADDING_BLOCKS` and `TILE_BLOCKS` a tile; a tile is sorted by rows."""
    buckets: list[list[QueryRows]] = []
    padding = 0
    for query_rows in sorted(decoding, key=lambda r: -r.num_blocks):
        if buckets:
            padding += buckets[-1][0].num_blocks - query_rows.num_blocks
        if not buckets or padding > PADDING_BLOCKS or (len(buckets[-1]) + 1) * buckets[-1][0].num_blocks > TILE_BLOCKS:
            buckets.append([])
            padding = 0
        buckets[-1].append(query_rows)
    return [tuple(sorted(bucket, key=lambda r: r.row)) for bucket in buckets]
