"""Finds the physical block ids of a sequence's logical blocks in its block table, on the host.

Logical block `i` of a sequence holds its tokens `[i * P, (i + 1) * P)`, where P is the block size. The table's first
`num_sink_blocks` columns hold logical blocks 0, 1, ... (attention sinks); the columns behind them hold one run of consecutive
logical blocks that begins at `first_block`. With 1 sink block and `first_block` 5 the table `[7, 3, 9]` says: logical block 0
is physical block 7, logical block 5 is 3, logical block 6 is 9; blocks 1 to 4 lie behind the window and were freed.
"""

from __future__ import annotations

from transom_kernels.paged_attention.batch import PagedBatch


def physical_blocks(batch: PagedBatch, b: int, start: int, end: int) -> list[int]:
    """Physical ids of the logical blocks [start, end) of sequence `b`.

    Raises:
        IndexError: the table lacks one of them. This is a bug of the scheduler, never a user's mistake.
    """
    num_sink_blocks, table = batch.num_sink_blocks, batch.block_table_host[b]
    edge = min(max(start, num_sink_blocks), end)  # [start, edge) lies in the sink blocks, [edge, end) in the run
    shift = num_sink_blocks - batch.first_block_host[b]
    ids = table[start:edge]
    if end > edge and edge + shift >= num_sink_blocks:
        ids = ids + table[edge + shift : end + shift]
    if len(ids) != end - start or (ids and min(ids) < 0):
        raise IndexError(
            f"Sequence {b} reads logical blocks [{start}, {end}), but its table has {num_sink_blocks} sink blocks and a run "
            f"from block {batch.first_block_host[b]}: {table}."
        )
    return ids
