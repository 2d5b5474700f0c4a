"""The sampling parameters of many sequences, in memory that the CPU kernel reads: one record of int64 words for each sequence.

A sequence's record is written once. Each step passes the kernel the numbers of its rows' records, so that it neither gathers nor
copies parameters. From step to step only the output position and the ids that penalties change are updated:

    number = table.add(key=..., temperature=..., ...)       when the sequence arrives
    table.set_position(number, 7)                           in each step: 7 tokens of output so far
    table.set_counts(number, token_ids, counts, n)          in each step, if the sequence has penalties
    table.remove(number)                                    when it ends

- adjustment: a change of a row's logits before temperature: bias, banned ids, penalties.
- ban: ids whose logits are -inf while the output is shorter than `min_tokens`.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Word(IntEnum):
    """The words of a record. The word after the address of an array of ids says how many ids it has; the array of values or counts
    that follows is equally long.
    """

    KEY = 0  # of the noise; the kernel mixes it with POSITION unless that is KEY_IS_FINAL
    POSITION = 1
    TEMPERATURE = 2  # float32; 0: greedy
    TOP_K = 3  # off if 0; has no effect if the vocabulary has no more ids
    TOP_P = 4  # float64; 1: off
    LOG_MIN_P = 5  # float64; -inf: off
    IS_ADJUSTED = 6
    BIAS_IDS = 7  # address of int64
    NUM_BIAS = 8
    BIAS_VALUES = 9  # address of float32
    BANNED_IDS = 10  # address of int64
    NUM_BANNED = 11
    MIN_TOKENS = 12
    TOKEN_IDS = 13  # address of int64: each id of prompt and output once
    NUM_TOKENS = 14
    OUTPUT_COUNTS = 15  # address of int64: how often each id of TOKEN_IDS is in the output
    REPETITION = 16  # float32
    PRESENCE = 17  # float32
    FREQUENCY = 18  # float32


RECORD_WORDS = 20  # the last one is unused
RECORD_BYTES = 8 * RECORD_WORDS
KEY_IS_FINAL = -1

_POSITION = int(Word.POSITION)
_FIRST_RECORDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """The changes of a row's logits before temperature. In this order: bias is added, bans set -inf, penalties apply.

    The logit of a penalised id is divided by `repetition` if it is positive and multiplied by it if it is negative; then `presence`
    is subtracted if the id is in the output, and `frequency` once for each occurrence there.
    """

    bias_ids: Ints
    bias_values: Floats
    banned_ids: Ints
    min_tokens: int
    repetition: float
    presence: float
    frequency: float


@dataclass(slots=True)
class _Kept:
    """The arrays whose addresses a record contains; they must live as long as the record."""

    fixed: tuple[Ints | Floats, ...] = ()
    counts: tuple[Ints, ...] = field(default_factory=tuple)


class SampleTable:
    """All records, which are known by their numbers. Not thread-safe."""

    def __init__(self) -> None:
        self._hold(torch.zeros(_FIRST_RECORDS, RECORD_WORDS, dtype=torch.int64))
        self._free = list(range(_FIRST_RECORDS - 1, -1, -1))
        self._kept: dict[int, _Kept] = {}
        self._copies = torch.empty(0, dtype=torch.float32)

    def add(
        self,
        *,
        key: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        position: int = KEY_IS_FINAL,
        adjustments: Adjustments | None = None,
    ) -> int:
        """Write a record and return its number. `key` is a signed 64-bit integer."""
        if not self._free:
            self._grow()
        number = self._free.pop()
        record = self._array[number]
        record[:] = 0
        record[Word.KEY], record[Word.POSITION] = key, position
        record[Word.TOP_K] = min(max(0, top_k), np.iinfo(np.int64).max)
        doubles, singles = record.view(np.float64), record.view(np.float32)
        singles[2 * Word.TEMPERATURE] = temperature
        doubles[Word.TOP_P] = top_p
        with np.errstate(divide="ignore"):
            doubles[Word.LOG_MIN_P] = np.log(np.float64(min_p))
        self._kept[number] = _Kept()
        if adjustments is not None:
            self._adjust(number, record, adjustments)
        return number

    def remove(self, number: int) -> None:
        """Free a record."""
        del self._kept[number]
        self._free.append(number)

    def set_position(self, number: int, position: int) -> None:
        """Set the output position of a record."""
        self._numbers[number * RECORD_WORDS + _POSITION] = position

    def set_counts(self, number: int, token_ids: Ints, output_counts: Ints, num_tokens: int) -> None:
        """Set the ids that penalties change: the first `num_tokens` of both arrays, which the caller may extend in place."""
        record, kept = self._array[number], self._kept[number]
        record[Word.NUM_TOKENS] = num_tokens
        if not kept.counts or kept.counts[0] is not token_ids:
            record[Word.TOKEN_IDS], record[Word.OUTPUT_COUNTS] = token_ids.ctypes.data, output_counts.ctypes.data
            kept.counts = token_ids, output_counts

    def copies(self, num_rows: int, num_ids: int) -> torch.Tensor:
        """Return float32 memory for copies of rows; the operating system provides pages when they are first written."""
        if self._copies.numel() < num_rows * num_ids:
            self._copies = torch.empty(num_rows * num_ids, dtype=torch.float32)
        return self._copies

    def linked_memory(self) -> list[tuple[int, int]]:
        """Return the arrays that records point at, as (address, bytes)."""
        arrays = [array for kept in self._kept.values() for array in (*kept.fixed, *kept.counts)]
        return [(array.ctypes.data, array.nbytes) for array in arrays]

    def _adjust(self, number: int, record: Ints, adjustments: Adjustments) -> None:
        record[Word.IS_ADJUSTED] = 1
        ids, values, banned = adjustments.bias_ids, adjustments.bias_values, adjustments.banned_ids
        record[Word.BIAS_IDS], record[Word.BIAS_VALUES], record[Word.NUM_BIAS] = (
            ids.ctypes.data, values.ctypes.data, len(ids),
        )  # fmt: skip
        record[Word.BANNED_IDS], record[Word.NUM_BANNED] = banned.ctypes.data, len(banned)
        record[Word.MIN_TOKENS] = adjustments.min_tokens
        singles = record.view(np.float32)
        singles[2 * Word.REPETITION] = adjustments.repetition
        singles[2 * Word.PRESENCE] = adjustments.presence
        singles[2 * Word.FREQUENCY] = adjustments.frequency
        self._kept[number].fixed = ids, values, banned

    def _grow(self) -> None:
        before = len(self.words)
        self._hold(torch.cat([self.words, torch.zeros_like(self.words)]))
        self._free = list(range(2 * before - 1, before - 1, -1))

    def _hold(self, words: torch.Tensor) -> None:
        self.words = words
        self._array: Ints = words.numpy()
        self._numbers = self._array.reshape(
            -1
        ).data  # a memoryview, to which single numbers are written five times as fast
