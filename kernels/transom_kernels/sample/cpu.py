"""Launches the sampling kernel for CPUs, and declares its arguments.

Legend: S rows, V vocabulary, or a slice of it, P pieces of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.bounds import CHECKED
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import empty, launch
from transom_kernels.sample.params import NOISE_BLOCK
from transom_kernels.sample.table import SampleTable

PIECE_BLOCKS = 128  # noise blocks of a piece, which is an item of work
AREA_BYTES = PIECE_BLOCKS * 24 + 16  # of a piece's summary


class SampleArguments(NamedTuple):
    """The words of `sample`."""

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
    """Sample one token id of each row of `logits` [S, V]; returns [S] int64. Row s has the record `numbers[s]` of the table.

    `allowed` [S, ceil(V / 8)] uint8 has a bit for each id, lowest first; an id whose bit is 0 is not sampled. Column v is token id
    `first_id` + v: for a slice of the vocabulary, whose records have neither filters nor adjustments. `scores` [S] float64 takes
    the scores of the sampled ids, by which the ids of several slices are compared. The logits are not changed.
    """
    num_rows, num_ids = logits.shape
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
            counters=_counters(num_rows),
            copies=table.copies(num_rows, num_ids),
            masks=allowed,
        ),
        scratch_bytes=4 * (num_ids + 16),
        linked=table.linked_memory() if CHECKED else (),
    )
    return out


_zeros = [torch.zeros(64, dtype=torch.int64)]  # the last one is in use; a recorded program may still use an earlier one


def _counters(num_rows: int) -> torch.Tensor:
    """Zeros that a launch counts finished pieces in, and leaves at zero."""
    if len(_zeros[-1]) < num_rows:
        _zeros.append(torch.zeros(2 * num_rows, dtype=torch.int64))
    return _zeros[-1]
