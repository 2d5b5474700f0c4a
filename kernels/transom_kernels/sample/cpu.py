"""Launches the CPU kernel `sample`, which picks one token id for each row of logits, and declares its arguments.

A *piece* of a row is a work item. Threads write a *summary* of each piece, from which the row's token is chosen (`cpu_kernel.py`).
A *noise block* is 64 ids that share a random number (`reference.py`). A *record* has a sequence's parameters (`table.py`).

Legend: S rows, V ids of the vocabulary (or of a tensor-parallel rank's slice of it), P pieces of a row.
"""

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import counters, empty, launch
from transom_kernels.sample.reference import NOISE_BLOCK
from transom_kernels.sample.table import SampleTable

PIECE_BLOCKS = 128  # noise blocks of a piece, which is a work item
AREA_BYTES = PIECE_BLOCKS * 24 + 16  # bytes of a piece's summary: 24 for each block, 16 for the piece


class SampleArguments(NamedTuple):
    """The argument words of the kernel `sample`."""

    logits: RowArguments  # [S, V] float32
    num_ids: int  # V
    first_id: int  # the token id of column 0
    table: torch.Tensor  # the records of a `SampleTable`
    numbers: torch.Tensor  # [S] int64: each row's record
    out: torch.Tensor  # [S] int64
    scores: torch.Tensor | None  # [S] float64
    area: torch.Tensor  # [S, P, AREA_BYTES] uint8: summaries of the pieces
    num_pieces: int  # P
    counters: torch.Tensor  # [S] int64 of zeros, which the kernel leaves at zero: finished pieces of each row
    copies: torch.Tensor  # [S, V] float32: rows that are adjusted
    masks: torch.Tensor | None  # [S, V / 8] uint8: a grammar's bits


AT = numbers_of(SampleArguments)


def sample_records(
    logits: torch.Tensor,
    table: SampleTable,
    numbers: torch.Tensor,
    *,
    allowed: torch.Tensor | None = None,
    first_id: int = 0,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token id for each row of `logits` [S, V]; return [S] int64. Row s uses the record `numbers[s]` of the table.

    `allowed` [S, ceil(V / 8)] uint8 has a bit for each id, lowest first; an id whose bit is 0 is not sampled. Column v is token id
    `first_id` + v. It is above 0 only for a slice of the vocabulary, whose records must have no filters and no adjustments.
    `scores` [S] float64 receives the scores of the sampled ids, so that the winners of several slices can be compared. The logits
    are not changed.
    """
    num_rows, num_ids = logits.shape
    # pieces hold whole noise blocks, the first of which may begin before column 0
    num_pieces = -(-(num_ids + first_id % NOISE_BLOCK) // (NOISE_BLOCK * PIECE_BLOCKS))
    out = empty((num_rows,), torch.int64)
    launch(
        cpu_kernel("transom_kernels.sample.cpu_kernel", "make_sample"),
        num_rows * num_pieces,
        SampleArguments(
            logits=RowArguments.of(logits),
            num_ids=num_ids,
            first_id=first_id,
            table=table.words,
            numbers=numbers,
            out=out,
            scores=scores,
            area=empty((num_rows * num_pieces * AREA_BYTES,), torch.uint8),
            num_pieces=num_pieces,
            counters=counters(num_rows),
            copies=table.copies(num_rows, num_ids),
            masks=allowed,
        ),
        scratch_bytes=4 * (num_ids + 16),
        linked=table.linked_memory() if CHECKED else (),
    )
    return out
