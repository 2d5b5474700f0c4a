"""The sizes that decode steps are padded to, so that few CUDA graphs serve all of them. Integers only.

A step replays the graph of the smallest size that it fits into. A size has two parts:

- num_seqs: how many sequences, out of 1, 2, 4, 8, 16, 24, 32, 48, ...
- level: how long their contexts are. It sets how wide block tables are, and how many work items an attention layer has.

- work item: what one program of an attention kernel computes, per KV head: one sequence's query over a range of keys. A sequence
  with more than `tuning.DECODE_SPLIT_KEYS` keys is split into several work items, whose partial results are combined afterwards.

Level 0 has one work item per sequence. Level n above it has 4**n work items per sequence on average. Since sequences have different
lengths, a level's tables are wide enough for a sequence twice as long as that average.

Example with DECODE_SPLIT_KEYS 1,024: level 0 reaches up to 1,024 tokens; level 1 up to 2 x 1,024 x 4 = 8,192, level 2 up to 32,768.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_core.kv_cache.groups import GroupSpec
from transom_kernels.paged_attention.triton import tuning

# The largest number of work items of an attention layer. With more, the device takes longer to read the keys than the host takes to
# launch the kernels, so a graph would gain nothing. At this limit, partial results take up to 128 MiB, at 8 KV heads of 128.
MAX_ITEMS = 1024
LEVEL_FACTOR = 4  # each level has this many times the work items of the level below
LONGEST_TO_AVERAGE = 2  # the longest sequence of a level above 0, as a multiple of its average sequence


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DecodeSize:
    """The size of one captured graph."""

    level: int
    num_seqs: int

    def __str__(self) -> str:
        return f"{self.num_seqs} sequences at level {self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What one decode step needs: its sequences, the work items of the layer that has the most, whether some of these must be
    combined, and table columns by group.
    """

    num_seqs: int
    num_items: int
    has_combine_items: bool
    num_columns: tuple[int, ...]


class DecodeSizes:
    """All sizes of decode steps for a model and its settings."""

    def __init__(
        self, groups: Sequence[GroupSpec], *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self._split_keys = tuning.DECODE_SPLIT_KEYS
        self._groups, self._max_model_len, self._most_new = tuple(groups), max_model_len, max_num_batched_tokens
        # Work items of the longest sequence: one more than its keys need, because splits end at multiples of `split_keys`, and the
        # keys of a window may begin between two multiples.
        self._most_splits = -(-max_model_len // self._split_keys) + 1
        self.num_seqs = _buckets(max_num_seqs)
        self.num_levels = next(level for level in range(64) if self._reaches_all(level)) + 1

    @property
    def num_groups(self) -> int:
        """The number of KV cache groups."""
        return len(self._groups)

    @property
    def all(self) -> tuple[DecodeSize, ...]:
        """Every size, in the order of capture: low levels first, since they are used most, and the largest of each level first,
        because smaller graphs reuse its memory.
        """
        levels = range(self.num_levels)
        every = (DecodeSize(level=level, num_seqs=num) for level in levels for num in reversed(self.num_seqs))
        return tuple(size for size in every if self._adds(size))

    def smallest_for(self, step: StepSize) -> DecodeSize | None:
        """Return the smallest size that a step fits into; None if there is none."""
        num_seqs = next((num for num in self.num_seqs if num >= step.num_seqs), None)
        if num_seqs is None:
            return None
        for level in range(self.num_levels):
            size = DecodeSize(level=level, num_seqs=num_seqs)
            num_padding = num_seqs - step.num_seqs  # each padding sequence has one work item
            if (step.has_combine_items and level == 0) or step.num_items + num_padding > self.num_items(size):
                continue
            if all(step.num_columns[group] <= self.num_columns(size, group) for group in range(len(self._groups))):
                return size
        return None

    def reach_tokens(self, level: int) -> int:
        """Return the longest sequence of a level, for groups without a window."""
        reach = self._split_keys if level == 0 else LONGEST_TO_AVERAGE * self._split_keys * LEVEL_FACTOR**level
        return min(reach, self._max_model_len)

    def longest_tokens(self, size: DecodeSize) -> int:
        """Return the longest sequence that fits into a size if all its other sequences are short enough for one work item each."""
        # The others take one work item each, and the longest has what is left.
        num_left = self.num_items(size) - size.num_seqs + 1
        return min(self.reach_tokens(size.level), num_left * self._split_keys)

    def num_items(self, size: DecodeSize) -> int:
        """Return the number of work items of each attention layer, per KV head.

        At level 0 every sequence has one. Above level 0, the number has room for either of two steps, within two limits:

        - an even step: each sequence has the level's average, LEVEL_FACTOR**level;
        - an uneven step: one sequence is as long as the level reaches, and the others have one work item each;
        - limit: the sequences cannot have more work items than if all were as long as the model allows;
        - limit: `MAX_ITEMS`, but at least two work items for each sequence, since a size without splits would be that of level 0.
        """
        num_seqs = size.num_seqs
        if size.level == 0:
            return num_seqs
        even: int = num_seqs * LEVEL_FACTOR**size.level
        uneven = -(-self.reach_tokens(size.level) // self._split_keys) + num_seqs
        return min(max(even, uneven), num_seqs * self._most_splits, max(MAX_ITEMS, 2 * num_seqs))

    def num_combine_items(self, size: DecodeSize) -> int:
        """Return how many sequences may have combined work items.

        Each of them has at least two work items, so there are at most half as many of them as work items.
        """
        return 0 if size.level == 0 else min(size.num_seqs, self.num_items(size) // 2)

    def num_columns(self, size: DecodeSize, group: int) -> int:
        """Return the columns of a group's block table."""
        spec = self._groups[group]
        columns = -(-self.reach_tokens(size.level) // spec.block_size)
        if not spec.keeps_everything:
            # The group keeps the tokens that queries read and a step's new tokens; at both ends this range may begin inside a
            # block.
            kept = (spec.window or spec.chunk) + self._most_new
            columns = min(columns, -(-kept // spec.block_size) + 2)
        return columns + spec.num_sink_blocks

    def _reaches_all(self, level: int) -> bool:
        """Return whether this level is enough for every decode step that graphs are meant for."""
        if level == 0:
            return self._max_model_len <= self._split_keys
        if self.reach_tokens(level) < self._max_model_len:
            return False
        at_level = [DecodeSize(level=level, num_seqs=num) for num in self.num_seqs]
        return all(self.num_items(size) >= min(size.num_seqs * self._most_splits, MAX_ITEMS) for size in at_level)

    def _adds(self, size: DecodeSize) -> bool:
        """Return whether a size has more capacity than the size with as many sequences one level below."""
        return size.level == 0 or self._capacity(size) != self._capacity(
            DecodeSize(level=size.level - 1, num_seqs=size.num_seqs)
        )

    def _capacity(self, size: DecodeSize) -> tuple[int, ...]:
        """Return the numbers of work items, of combined sequences, and of table columns by group."""
        columns = (self.num_columns(size, group) for group in range(len(self._groups)))
        return (self.num_items(size), self.num_combine_items(size), *columns)


def _buckets(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, 24, 32, 48, 64, 96 and so on, up to `most`: from 16 on, each is at most 1.5 times the one before."""
    sizes, num = [1, 2, 4, 8], 16
    while num < 2 * most:
        sizes += [num, num + num // 2]
        num *= 2
    return (*(size for size in sizes if size < most), most)
