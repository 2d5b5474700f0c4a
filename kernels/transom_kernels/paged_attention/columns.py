"""Where logical blocks stand in a sequence's block table."""

from __future__ import annotations

from transom_kernels.paged_attention.batch import PagedBatch


def span_ids(batch: PagedBatch, b: int, start: int, end: int) -> list[int]:
    """Ids of sequence `b`'s logical blocks [start, end).

    Raises:
        IndexError: the table does not hold them all; a scheduler's bug, never a user's.
    """
    pinned, table = batch.num_sink_blocks, batch.block_table_host[b]
    edge = min(max(start, pinned), end)  # [start, edge) pinned, [edge, end) in the run
    shift = pinned - batch.first_block_host[b]
    ids = table[start:edge]
    if end > edge and edge + shift >= pinned:
        ids = ids + table[edge + shift : end + shift]
    if len(ids) != end - start or (ids and min(ids) < 0):
        raise IndexError(
            f"Sequence {b} reads logical blocks [{start}, {end}), but its table has {pinned} pinned blocks and a run "
            f"from block {batch.first_block_host[b]}: {table}."
        )
    return ids
