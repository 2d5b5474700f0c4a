"""Keeps (token id, number) pairs of many sequences in the memory of the device that samples (`TokenTable`).

Penalties, bias and bans change the logits of certain token ids of a sequence, often thousands of ids, at every step. But from one
step to the next a sequence has only one new or changed pair. So the pairs stay on the device, and a step uploads only the changed
ones and four numbers for each row. Example, a batch whose rows 0 and 2 have penalties:

    table      segment of row 2's sequence   segment of row 0's sequence     a segment's end is kept free for growth
    ids        17  4  230   -  -  -  -  -    5  4   -  -  -  -  -  -
    step       rows 0, 2; lengths 2, 3; where the segments begin            uploaded
    gathered   row 0 0 2 2 2; id 5 4 17 4 230; their numbers                 on the device

A pair's *place* is its index in its sequence's segment, or, with the segment's start added, in the table.

Legend: N rows with pairs, C pairs of these rows, U pairs that are new or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from transom_worker.uploads import Uploads

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

LEAST_CAPACITY = 64  # pairs that the smallest segment holds; a larger one holds a power of two


class TokenPairs(Protocol):
    """One sequence's pairs, on the host. A token id occurs once."""

    def __len__(self) -> int:
        """Return the number of pairs; it never falls."""

    def take_changed(self) -> tuple[Ints, Ints, Floats]:
        """Return places, ids and numbers of the pairs that are new or changed since the last call, each place once."""


class FixedPairs:
    """Pairs that do not change."""

    def __init__(self, ids: Ints, values: Floats) -> None:
        self._ids, self._values = ids, values
        self._is_taken = False

    def __len__(self) -> int:
        return len(self._ids)

    def take_changed(self) -> tuple[Ints, Ints, Floats]:
        """Return all pairs at the first call, and none later."""
        length = 0 if self._is_taken else len(self._ids)
        self._is_taken = True
        return np.arange(length), self._ids[:length], self._values[:length]


@dataclass(frozen=True, slots=True)
class RowPairs:
    """The pairs of a step's rows."""

    row: torch.Tensor  # [C] int64
    token: torch.Tensor  # [C] int64
    value: torch.Tensor  # [C] float32
    row_value: torch.Tensor  # [C] float32: the number of the pair's row


@dataclass(slots=True)
class _Segment:
    start: int
    capacity: int


class TokenTable:
    """The pairs of many sequences, each sequence's in a segment of its own. All calls must be for the same device."""

    def __init__(self) -> None:
        self._ids = torch.empty(0, dtype=torch.int64)
        self._values = torch.empty(0)
        self._segments: dict[TokenPairs, _Segment] = {}
        self._free: dict[int, list[int]] = {}  # capacity -> starts of free segments
        self._end = 0  # where the last segment ends

    @property
    def capacity(self) -> int:
        """Return the number of pairs that the table has memory for."""
        return len(self._ids)

    def remove(self, pairs: TokenPairs) -> None:
        """Free the segment of these pairs, if they have one."""
        segment = self._segments.pop(pairs, None)
        if segment is not None:
            self._release(segment)

    def gather(
        self, rows: Sequence[int], pairs: Sequence[TokenPairs], row_values: Sequence[float], uploads: Uploads
    ) -> RowPairs | None:
        """Upload what changed, and return all pairs of the rows numbered `rows`; None if there is no pair.

        `pairs` and `row_values` have one element for each of these rows.
        """
        lengths = np.array([len(one) for one in pairs], dtype=np.int64)
        total = int(lengths.sum())
        if not total:
            return None
        device = uploads.device
        starts = np.array([self._segment(one, device).start for one in pairs], dtype=np.int64)
        shifts = starts - (lengths.cumsum() - lengths)  # a pair's place in the table minus its place in the result
        places, ids, values = self._changed(pairs)
        on = uploads.tensors(
            {
                "row": np.asarray(rows, np.int64),
                "row_value": np.asarray(row_values, np.float32),
                "shift": shifts,
                "length": lengths,
                "place": places,
                "id": ids,
                "value": values,
            }
        )
        if len(places):
            self._ids[on["place"]] = on["id"]
            self._values[on["place"]] = on["value"]
        number_C = torch.repeat_interleave(on["length"], output_size=total)
        place_C = torch.arange(total, device=device) + on["shift"][number_C]
        return RowPairs(on["row"][number_C], self._ids[place_C], self._values[place_C], on["row_value"][number_C])

    def _changed(self, pairs: Sequence[TokenPairs]) -> tuple[Ints, Ints, Floats]:
        """Return the places in the table, ids and numbers of all pairs that are new or changed."""
        places, ids, values = zip(*(one.take_changed() for one in pairs), strict=True)
        in_table = [self._segments[one].start + place for one, place in zip(pairs, places, strict=True)]
        return np.concatenate(in_table), np.concatenate(ids), np.concatenate(values)

    def _segment(self, pairs: TokenPairs, device: torch.device) -> _Segment:
        """Return the segment of these pairs, moved if it was too small for all of them."""
        segment = self._segments.get(pairs)
        if segment is None or segment.capacity < len(pairs):
            new = self._allocate(max(LEAST_CAPACITY, 1 << (len(pairs) - 1).bit_length()), device)
            if segment is not None:
                for column in (self._ids, self._values):
                    column[new.start : new.start + segment.capacity] = column[
                        segment.start : segment.start + segment.capacity
                    ]
                self._release(segment)
            segment = self._segments[pairs] = new
        return segment

    def _allocate(self, capacity: int, device: torch.device) -> _Segment:
        free = self._free.get(capacity)
        if free:
            return _Segment(free.pop(), capacity)
        start, self._end = self._end, self._end + capacity
        if self._end > len(self._ids):
            more = max(self._end, 2 * len(self._ids)) - len(self._ids)
            self._ids = torch.cat([self._ids.to(device), torch.zeros(more, dtype=torch.int64, device=device)])
            self._values = torch.cat([self._values.to(device), torch.zeros(more, device=device)])
        return _Segment(start, capacity)

    def _release(self, segment: _Segment) -> None:
        self._free.setdefault(segment.capacity, []).append(segment.start)
