"""The sizes that steps are padded to, so that few CUDA graphs serve all of them. Integers only.

A step replays the graph of the smallest size that it fits into: *padding* sequences and tokens fill it up. A decode size has two
parts:

- num_seqs: how many sequences, out of 1, 2, 4, 8, 16, 24, 32, 48, ...
- level: how long their contexts are. It sets how wide block tables are, and how many work items an attention layer has.

- work item: what one program of an attention kernel computes, per KV head: one sequence's query over a range of keys. A sequence
  with more than `tuning.DECODE_SPLIT_KEYS` keys is split into several work items, whose partial results are combined afterwards.

At level 0 every sequence has one work item. At level n > 0 a step may have 4**n work items per sequence on average. Sequences have
different lengths, so a level's tables are wide enough for a sequence twice as long as that average.

Example with DECODE_SPLIT_KEYS 1,024: level 0 reaches up to 1,024 tokens; level 1 up to 2 x 1,024 x 4 = 8,192, level 2 up to 32,768.

*Mixed* steps, which compute prompt chunks beside decodes or alone, have sizes with a third part, the number of tokens
(`MIXED_TOKENS`), and with few numbers of sequences, since padding sequences cost hardly anything there. Attention has a launch for
each tiling (`tuning.tilings`), and each launch has room for a fixed number of work items (`DecodeSizes.room`):

- sequences with one new token: as in a decode size with this level and number of sequences;
- with a few: as in a decode size of `FEW_SEQS` sequences, for each tile that such a sequence has;
- with many: as many tiles as the step's tokens can have. Padding tokens are tiles of this launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transom_core.kv_cache.groups import GroupSpec
from transom_kernels.paged_attention.triton import tuning
from transom_kernels.paged_attention.triton.work_items import Tiling

# The largest number of work items of an attention layer. With more, the device takes longer to read the keys than the host takes to
# launch the kernels, so a graph would gain nothing. At this limit, partial results take up to 128 MiB, at 8 KV heads of 128.
MAX_ITEMS = 1024
LEVEL_FACTOR = 4  # each level has this many times the work items of the level below
LONGEST_TO_AVERAGE = 2  # the longest sequence of a level above 0, as a multiple of its average sequence
# Tokens of mixed steps. Up to some 256 tokens a step takes as long as reading the weights, so padding is nearly free: an H100
# computes 295 bfloat16 operations in the time of reading a byte, and a token needs one for each byte of weights. Above, padding
# takes time, so sizes are closer. A step of over 512 tokens keeps the device busy for longer than the host takes to launch it.
MIXED_TOKENS = (128, 256, 384, 512)
MIXED_SEQS = 32  # sequences of the smaller mixed sizes; the larger ones have as many as the engine may run
# The most sequences with a few new tokens in a mixed step: a prompt's last chunk, or what a cached prefix leaves. Hardly any step
# has two.
FEW_SEQS = 8


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DecodeSize:
    """The size of one captured graph. `mixed_tokens` are the tokens of a mixed step; 0: a decode step, one token per sequence."""

    level: int
    num_seqs: int
    mixed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """The tokens that the graph computes."""
        return self.mixed_tokens or self.num_seqs

    def __str__(self) -> str:
        mixed = f" and {self.mixed_tokens} tokens with prompts" if self.mixed_tokens else ""
        return f"{self.num_seqs} sequences{mixed} at level {self.level}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What one step needs: its sequences, the work items of the layer that has the most, whether some of these must be combined,
    and table columns by group.

    For a mixed step, `num_items` are those of sequences with one new token; `num_few_items` those of sequences with a few, for each
    tile that such a sequence has.
    """

    num_seqs: int
    num_items: int
    has_combine_items: bool
    num_columns: tuple[int, ...]
    mixed_tokens: int = 0  # 0: a decode step
    num_few_items: int = 0


class DecodeSizes:
    """All sizes of decode steps and mixed steps for a model and its settings."""

    def __init__(
        self, groups: Sequence[GroupSpec], *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self._split_keys = tuning.DECODE_SPLIT_KEYS
        self._groups, self._max_model_len, self._most_new = tuple(groups), max_model_len, max_num_batched_tokens
        # Work items of the longest sequence: one more than its keys need, because splits end at multiples of `split_keys`, and the
        # keys of a window may begin between two multiples.
        self._most_splits = -(-max_model_len // self._split_keys) + 1
        self.num_seqs = _buckets(max_num_seqs)
        # (tokens, sequences) of mixed steps in ascending order. At least one sequence has two tokens; else it is a decode step.
        self._mixed = [
            (tokens, num_seqs)
            for tokens in MIXED_TOKENS
            if tokens <= max_num_batched_tokens
            for num_seqs in sorted({min(num, max_num_seqs, tokens - 1) for num in (MIXED_SEQS, max_num_seqs)})
        ]
        self.num_levels = next(level for level in range(64) if self._reaches_all(level)) + 1

    @property
    def num_groups(self) -> int:
        """The number of KV cache groups."""
        return len(self._groups)

    @property
    def all(self) -> tuple[DecodeSize, ...]:
        """Every size, in the order of capture: decode sizes first; then low levels first, since they are used most, and the largest
        of each level first, because smaller graphs reuse its memory.
        """
        return (*self.decodes, *self.mixed)

    @property
    def decodes(self) -> tuple[DecodeSize, ...]:
        """Every size of decode steps, in the order of capture."""
        return self._at_all_levels([(0, num) for num in self.num_seqs])

    @property
    def mixed(self) -> tuple[DecodeSize, ...]:
        """Every size of mixed steps, in the order of capture."""
        return self._at_all_levels(self._mixed)

    @property
    def most_mixed_tokens(self) -> int:
        """The most tokens of a mixed step with a size; 0 if there is no such size."""
        return max((tokens for tokens, _ in self._mixed), default=0)

    def smallest_for(self, step: StepSize) -> DecodeSize | None:
        """Return the smallest size that a step fits into; None if there is none."""
        tokens, num_seqs = 0, next((num for num in self.num_seqs if num >= step.num_seqs), 0)
        num_padding = num_seqs - step.num_seqs  # each padding sequence of a decode step has one work item
        if step.mixed_tokens:
            fitting = (one for one in self._mixed if one[0] >= step.mixed_tokens and one[1] >= step.num_seqs)
            (tokens, num_seqs), num_padding = next(fitting, (0, 0)), 0
        if not num_seqs:
            return None
        for level in range(self.num_levels):
            size = DecodeSize(level=level, num_seqs=num_seqs, mixed_tokens=tokens)
            if (step.has_combine_items and level == 0) or step.num_items + num_padding > self.num_items(size):
                continue
            if tokens and step.num_few_items > self.num_items(few_of(size)):
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

    def room(self, size: DecodeSize, tiling: Tiling) -> tuple[int, int]:
        """Return the numbers of work items and of combine items of an attention launch.

        For a few new tokens: the room of a decode size for each tile of a sequence; a combined tile has at least two work items.

        For many new tokens: a tile has t tokens, or fewer if it is a sequence's last one. A sequence of x tokens has
        ceil(x / t) < x / t + 1 tiles, so n sequences have at most tokens // t + n. The padding tokens count as one more sequence.
        There are no more such sequences than fit with `min_new_tokens` each, and no more tiles than tokens.
        """
        if tiling.max_new_tokens == 1:
            return self.num_items(size), self.num_combine_items(size)
        if tiling.split_keys:
            num_items = self.num_items(few_of(size)) * tiles_of_few(tiling)
            return num_items, num_items // 2 if size.level else 0
        num_prompts = min(size.num_seqs, size.mixed_tokens // tiling.min_new_tokens)
        return min(size.mixed_tokens, size.mixed_tokens // tiling.tile_tokens + num_prompts + 1), 0

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

    def _at_all_levels(self, shapes: Sequence[tuple[int, int]]) -> tuple[DecodeSize, ...]:
        """Return the sizes of (mixed tokens, sequences), low levels first, and the largest of each level first."""
        every = (
            DecodeSize(level=level, num_seqs=num_seqs, mixed_tokens=tokens)
            for level in range(self.num_levels)
            for tokens, num_seqs in reversed(shapes)
        )
        return tuple(size for size in every if self._adds(size))

    def _adds(self, size: DecodeSize) -> bool:
        """Return whether a size has more capacity than the size with as many sequences one level below."""
        return size.level == 0 or self._capacity(size) != self._capacity(replace(size, level=size.level - 1))

    def _capacity(self, size: DecodeSize) -> tuple[int, ...]:
        """Return the numbers of work items, of combined sequences, and of table columns by group."""
        columns = (self.num_columns(size, group) for group in range(len(self._groups)))
        num_few_items = self.num_items(few_of(size)) if size.mixed_tokens else 0
        return (self.num_items(size), num_few_items, self.num_combine_items(size), *columns)


def few_of(size: DecodeSize) -> DecodeSize:
    """Return the decode size that says how much room a mixed size has for sequences with a few new tokens."""
    return DecodeSize(level=size.level, num_seqs=min(FEW_SEQS, size.num_seqs))


def tiles_of_few(tiling: Tiling) -> int:
    """Return the most tiles of a sequence with a few new tokens, given their tiling."""
    return -(-tiling.max_new_tokens // tiling.tile_tokens)


def _buckets(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, 24, 32, 48, 64, 96 and so on, up to `most`: from 16 on, each is at most 1.5 times the one before."""
    sizes, num = [1, 2, 4, 8], 16
    while num < 2 * most:
        sizes += [num, num + num // 2]
        num *= 2
    return (*(size for size in sizes if size < most), most)
