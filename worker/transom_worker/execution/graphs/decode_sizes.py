"""Which sizes decode steps are brought to, so that few CUDA graphs serve all of them. Integers only.

A size is a number of sequences and a level, which stands for how far back they look: how many programs attention may have, and
how wide block tables are. Level 0 is for sequences that no program has to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_kernels.paged_attention import tuning
from transom_worker.kvcache.groups import GroupSpec

# Of a kind of attention layer. A step with more reads so many keys that the device is behind the host anyway. What programs leave
# for the join takes up to 128 MiB then, at 8 KV heads of 128.
MOST_ITEMS = 1024
STEPS_OF_LEVEL = 4  # each level has room for so many times as much


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DecodeSize:
    """A captured step's size."""

    level: int
    num_seqs: int

    def __str__(self) -> str:
        return f"{self.num_seqs} sequences at level {self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What one step takes: sequences, programs of the layers that have most, whether some are joined, columns by group."""

    num_seqs: int
    num_items: int
    has_combine_items: bool
    num_columns: tuple[int, ...]


class DecodeSizes:
    """All sizes of a model and its settings."""

    def __init__(
        self, groups: Sequence[GroupSpec], *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self._split_keys = tuning.DECODE_SPLIT_KEYS
        self._groups, self._max_model_len, self._most_new = tuple(groups), max_model_len, max_num_batched_tokens
        self._most_splits = -(-max_model_len // self._split_keys) + 1  # of one sequence
        self.num_seqs = _buckets(max_num_seqs)
        self.num_levels = next(level for level in range(64) if self._reaches_all(level)) + 1

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self._groups)

    @property
    def all(self) -> tuple[DecodeSize, ...]:
        """Every size: the usual levels first, of each level the largest first, whose memory serves the others."""
        levels = range(self.num_levels)
        every = (DecodeSize(level=level, num_seqs=num) for level in levels for num in reversed(self.num_seqs))
        return tuple(size for size in every if self._adds(size))

    def smallest_for(self, need: StepSize) -> DecodeSize | None:
        """The smallest size with room for a step, if any."""
        num_seqs = next((num for num in self.num_seqs if num >= need.num_seqs), None)
        if num_seqs is None:
            return None
        for level in range(self.num_levels):
            size = DecodeSize(level=level, num_seqs=num_seqs)
            more = num_seqs - need.num_seqs  # what is added has a program each
            if (need.has_combine_items and level == 0) or need.num_items + more > self.num_items(size):
                continue
            if all(need.num_columns[group] <= self.num_columns(size, group) for group in range(len(self._groups))):
                return size
        return None

    def reach_tokens(self, level: int) -> int:
        """The longest sequence of a level where nothing slides out."""
        ladder = self._split_keys if level == 0 else 2 * self._split_keys * STEPS_OF_LEVEL**level
        return min(ladder, self._max_model_len)

    def longest_tokens(self, size: DecodeSize) -> int:
        """The longest sequence that fits beside short ones, none of which are cut."""
        room = self.num_items(size) - size.num_seqs + 1
        return min(self.reach_tokens(size.level), room * self._split_keys)

    def num_items(self, size: DecodeSize) -> int:
        """Programs of each kind of attention layer, per KV head."""
        if size.level == 0:
            return size.num_seqs
        one_long = -(-self.reach_tokens(size.level) // self._split_keys) + size.num_seqs
        wanted: int = max(size.num_seqs * STEPS_OF_LEVEL**size.level, one_long)
        return min(wanted, size.num_seqs * self._most_splits, max(MOST_ITEMS, 2 * size.num_seqs))

    def num_combine_items(self, size: DecodeSize) -> int:
        """Sequences whose programs are joined: each has two or more."""
        return 0 if size.level == 0 else min(size.num_seqs, self.num_items(size) // 2)

    def num_columns(self, size: DecodeSize, group: int) -> int:
        """Columns of a group's block table."""
        spec = self._groups[group]
        columns = -(-self.reach_tokens(size.level) // spec.block_size)
        if not spec.keeps_everything:  # at most what is read, a step's new tokens, and the blocks at both ends
            kept = (spec.window or spec.chunk) + self._most_new
            columns = min(columns, -(-kept // spec.block_size) + 2)
        return columns + spec.num_sink_blocks

    def _reaches_all(self, level: int) -> bool:
        """Whether no step that graphs are for takes more than this level has."""
        if level == 0:
            return self._max_model_len <= self._split_keys
        if self.reach_tokens(level) < self._max_model_len:
            return False
        at_level = [DecodeSize(level=level, num_seqs=num) for num in self.num_seqs]
        return all(self.num_items(size) >= min(size.num_seqs * self._most_splits, MOST_ITEMS) for size in at_level)

    def _adds(self, size: DecodeSize) -> bool:
        """Whether there is more room than one level below."""
        return size.level == 0 or self._room(size) != self._room(
            DecodeSize(level=size.level - 1, num_seqs=size.num_seqs)
        )

    def _room(self, size: DecodeSize) -> tuple[int, ...]:
        columns = (self.num_columns(size, group) for group in range(len(self._groups)))
        return (self.num_items(size), self.num_combine_items(size), *columns)


def _buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96 and so on, to `most`: half as much again at the most, from 16 on."""
    sizes, num = [1, 2, 4, 8], 16
    while num < 2 * most:
        sizes += [num, num + num // 2]
        num *= 2
    return (*(size for size in sizes if size < most), most)
