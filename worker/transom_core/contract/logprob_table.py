"""Log-probabilities: of one position as objects, and of many positions as a `LogprobTable`. Its flat arrays take 12 bytes for an
entry, while a `Logprob` object takes about 130.

An *entry* is one token at one position: the chosen token first, then the most likely ones. All positions of a table have the same
number of entries. Example: a prompt of 100,000 tokens with 20 alternatives has 2.1 million entries, which take 25 MB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of one token and its rank (1 = most likely) before temperature and filters."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen token, and of the most likely tokens, the most likely first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


class LogprobTable(Sequence[TokenLogprobs]):
    """The log-probabilities of positions, in order. Reading a position makes its objects; a slice is a table with a copy of the
    entries."""

    __slots__ = ("_logprobs", "_ranks", "_token_ids", "_width")

    def __init__(self, width: int) -> None:
        """Make an empty table whose positions have `width` entries."""
        self._width = width
        self._token_ids: array[int] = array("i")
        self._logprobs: array[float] = array("f")
        self._ranks: array[int] = array("i")

    @classmethod
    def of(cls, positions: Iterable[TokenLogprobs]) -> LogprobTable:
        """Return a table of these positions. Raises ValueError if they have different numbers of entries."""
        table = cls(0)
        for position in positions:
            table.append(position)
        return table

    def append(self, position: TokenLogprobs) -> None:
        """Add one position. Raises ValueError if it has another number of entries."""
        entries = (position.chosen, *position.top)
        self._set_width(len(entries))
        self._token_ids.extend(entry.token_id for entry in entries)
        self._logprobs.extend(entry.logprob for entry in entries)
        self._ranks.extend(entry.rank for entry in entries)

    def extend(self, positions: Iterable[TokenLogprobs]) -> None:
        """Add positions. Those of another table are copied without making objects of them."""
        if not isinstance(positions, LogprobTable):
            for position in positions:
                self.append(position)
        elif len(positions):
            self.extend_columns(positions._width, positions._token_ids, positions._logprobs, positions._ranks)

    def extend_columns(self, width: int, token_ids: Any, logprobs: Any, ranks: Any) -> None:
        """Add positions of `width` entries each, given as buffers of int32, float32 and int32, position by position."""
        self._set_width(width)
        for part, values in ((self._token_ids, token_ids), (self._logprobs, logprobs), (self._ranks, ranks)):
            part.frombytes(memoryview(values).cast("B"))

    def __len__(self) -> int:
        return len(self._token_ids) // self._width if self._width else 0

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobTable: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | LogprobTable:
        if isinstance(index, slice):
            first, end, step = index.indices(len(self))
            if step != 1:
                return LogprobTable.of(self[at] for at in range(first, end, step))
            part, wanted = LogprobTable(self._width), slice(first * self._width, end * self._width)
            part._token_ids, part._logprobs = self._token_ids[wanted], self._logprobs[wanted]
            part._ranks = self._ranks[wanted]
            return part
        at = range(len(self))[index] * self._width
        entries = slice(at, at + self._width)
        columns = zip(self._token_ids[entries], self._logprobs[entries], self._ranks[entries], strict=True)
        chosen, *top = (Logprob(*column) for column in columns)
        return TokenLogprobs(chosen, tuple(top))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogprobTable):
            return NotImplemented
        return len(self) == len(other) and (not len(self) or self._parts == other._parts)

    __hash__ = None  # type: ignore[assignment]  # it can grow

    @property
    def _parts(self) -> tuple[int, Any, Any, Any]:
        return self._width, self._token_ids, self._logprobs, self._ranks

    def _set_width(self, width: int) -> None:
        if not len(self):
            self._width = width
        elif width != self._width:
            raise ValueError(f"A position has {width} entries; those before it have {self._width}.")
