"""Keeps (token id, number) pairs of many sequences in the memory of the device that samples (`TokenTable`), and counts
a sequence's tokens for repetition, presence and frequency penalties (`TokenCounts`).

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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from transom_core.contract import SamplingParams
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


SPARE = 64  # array elements that are kept free for new tokens


class TokenCounts:
    """The penalised tokens of a sequence, and how often each occurs in its output. Implements `TokenPairs` for a `TokenTable`.

    Only the repetition penalty applies to prompt tokens; without it the prompt is not read. A pair is a token and the number that
    presence and frequency penalties subtract from its logit.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int, params: SamplingParams) -> None:
        output = token_ids[num_prompt_tokens:]
        unique = dict.fromkeys(token_ids if params.repetition_penalty != 1.0 else output)
        self._slot: dict[int, int] = {token_id: slot for slot, token_id in enumerate(unique)}
        self._ids = np.empty(len(unique) + SPARE, dtype=np.int64)
        self._ids[: len(unique)] = list(unique)
        self._counts = np.zeros_like(self._ids)
        for token_id, count in Counter(output).items():
            self._counts[self._slot[token_id]] = count
        self._presence, self._frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        # Slots changed since the last `take_changed`; None before its first call.
        self._changed: list[int] | None = None

    def __len__(self) -> int:
        return len(self._slot)

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        slot = self._slot.setdefault(token_id, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1
        if self._changed is not None:
            self._changed.append(slot)

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return the tokens, each once, how often each occurs in the output, and how many elements of both arrays are in use.

        Later calls return the same arrays, until they are full.
        """
        return self._ids, self._counts, len(self._slot)

    def take_changed(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Return the slots of the tokens counted since the last call, the tokens, and what is subtracted from their logits.

        The first call returns all tokens.
        """
        changed = range(len(self)) if self._changed is None else dict.fromkeys(self._changed)
        self._changed = []
        slots = np.fromiter(changed, np.int64, len(changed))
        counts = self._counts[slots]
        minus = self._presence * (counts > 0) + self._frequency * counts.astype(np.float32)
        return slots, self._ids[slots], minus.astype(np.float32)
