"""The sizes that steps are padded to, so that few CUDA graphs serve all of them. Integers only.

A step replays the graph of the smallest size that it fits into; *padding* sequences and tokens take the room that the step leaves.
A decode size has two parts:

- num_seqs: how many sequences, out of 1, 2, 4, 8, 16, 24, 32, 48, ...
- level: how long their contexts are. It sets how wide block tables are, and how many work items an attention layer has. Level 0
  reaches up to 1,024 tokens, and the next ones up to 8,192, 32,768 and 131,072, which are the lengths of many models.

Terms of attention; a graph has room for a fixed number of work items, partial results and combine items (`DecodeSizes.room`):

- work item: what one program of a kernel computes, per KV head: a tile of one sequence's query tokens over a range of its keys. A
  tile of many keys has several work items (*splits*), only as many as fill the device (`work_items.Tiling.num_splits`).
- partial result: the result of a query token in one split. A *combine item* merges the partial results of one tile.
- tiling: the tile size of sequences with one, a few or many new tokens (`tuning.tilings`). Each tiling is a launch of its own.

*Mixed* steps, which compute prompt chunks beside decodes or alone, have sizes with a third part, the number of tokens
(`MIXED_TOKENS`), and only two numbers of sequences, because their padding sequences have no tokens and cost almost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le
from typing import NamedTuple

import numpy as np

from transom_core.kv_cache.groups import GroupSpec
from transom_kernels.paged_attention.triton.launches import LaunchKey
from transom_kernels.paged_attention.triton.work_items import Tiling, WorkPlan

SHORT_TOKENS = 1024  # the longest context of level 0
LEVEL_FACTOR = 4  # a level above 1 reaches this many times as far as the level below, level 1 twice this many times
# Tokens of mixed steps. Up to some 256 tokens a step takes as long as reading the weights, so padding is nearly free: an H100
# computes 295 bfloat16 operations in the time of reading a byte, and a token needs one for each byte of weights. Above, padding
# takes time, so sizes are closer. A step of over 512 tokens keeps the device busy for longer than the host takes to launch it.
MIXED_TOKENS = (128, 256, 384, 512)
MIXED_SEQS = 32  # sequences of the smaller mixed sizes; the larger ones have as many as the engine may run
# A mixed size has room for up to this many sequences with a few new tokens, and for the splits of this many long ones with many: a
# prompt's last chunk, or what a cached prefix leaves. Few steps have even two.
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


# (KV cache group, key, tiling): one launch of each attention layer in this group that has this launch key
AskedLaunch = tuple[int, LaunchKey, Tiling]


class Room(NamedTuple):
    """The most work items, combine items and partial results of an attention launch."""

    num_items: int
    num_combine_items: int
    num_partials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What one step needs: its sequences, table columns by group, and in a mixed step the work items of its launches."""

    num_seqs: int
    num_columns: tuple[int, ...]
    mixed_tokens: int = 0  # 0: a decode step
    works: tuple[tuple[AskedLaunch, WorkPlan], ...] = ()  # of a mixed step


class DecodeSizes:
    """All sizes of decode steps and mixed steps for a model and its settings."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        has_mixed: bool = True,
    ) -> None:
        self._groups, self._max_model_len, self._max_new_tokens = tuple(groups), max_model_len, max_num_batched_tokens
        self._rooms: dict[tuple[DecodeSize, AskedLaunch], Room] = {}
        self.num_seqs = _buckets(max_num_seqs)
        # (tokens, sequences) of mixed steps in ascending order. At least one sequence has two tokens; else it is a decode step.
        self._mixed = [
            (tokens, num_seqs)
            for tokens in MIXED_TOKENS
            if has_mixed and tokens <= max_num_batched_tokens
            for num_seqs in sorted({min(num, max_num_seqs, tokens - 1) for num in (MIXED_SEQS, max_num_seqs)})
        ]
        self.num_levels = next(level for level in range(64) if self.reach_tokens(level) == max_model_len) + 1

    @property
    def num_groups(self) -> int:
        """The number of KV cache groups."""
        return len(self._groups)

    @property
    def all(self) -> tuple[DecodeSize, ...]:
        """Every size, in the order of capture: decode sizes first; then low levels first, since they are used most, and the largest
        of each level first, because smaller graphs reuse its memory."""
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
        if step.mixed_tokens:
            fitting = (one for one in self._mixed if one[0] >= step.mixed_tokens and one[1] >= step.num_seqs)
            tokens, num_seqs = next(fitting, (0, 0))
        if not num_seqs:
            return None
        for level in range(self.num_levels):
            size = DecodeSize(level=level, num_seqs=num_seqs, mixed_tokens=tokens)
            if any(step.num_columns[group] > self.num_columns(size, group) for group in range(len(self._groups))):
                continue
            if all(self.has_room(size, step.mixed_tokens, *work) for work in step.works):
                return size
        return None

    def reach_tokens(self, level: int) -> int:
        """Return the longest sequence of a level, for groups without a window."""
        reach = SHORT_TOKENS if level == 0 else 2 * SHORT_TOKENS * LEVEL_FACTOR**level
        return min(reach, self._max_model_len)

    def room(self, size: DecodeSize, launch: AskedLaunch) -> Room:
        """Return the room of a size for an attention launch.

        For one new token, all sequences may be as long as the level reaches; each then has the most splits. For a few new tokens,
        `FEW_SEQS` sequences may be as long, and have the most tiles.

        For many new tokens: a tile has t tokens, or fewer if it is a sequence's last one. A sequence of x tokens has
        ceil(x / t) < x / t + 1 tiles, so n sequences have at most tokens // t + n. The padding tokens count as one more sequence.
        There are no more such sequences than fit with `min_new_tokens` each, and no more tiles than tokens. The splits of
        `FEW_SEQS` long sequences are added, up to the partial results of one eager launch (`most_partials`).
        """
        if (size, launch) not in self._rooms:
            self._rooms[size, launch] = self._room(size, *launch)
        return self._rooms[size, launch]

    def _room(self, size: DecodeSize, group: int, key: LaunchKey, tiling: Tiling) -> Room:
        keys = self.num_columns(size, group) * self._groups[group].block_size
        if visible := key.rule.window or key.rule.chunk:
            # Each further query of a tile sees one more key, and the first split begins at a multiple of `split_unit`.
            keys = min(keys, visible + tiling.tile_tokens + tiling.split_unit)
        # A sequence has 1 to `most_tiles` tiles; for each of these numbers, `splits` says how many splits each of its tiles has.
        most_tiles = -(-min(tiling.max_new_tokens, size.num_tokens) // tiling.tile_tokens)
        tiles = np.arange(1, most_tiles + 1)
        splits = tiling.num_splits(tiles, keys)
        is_split = bool(splits.max() > 1)
        num_seqs = size.num_seqs if tiling.max_new_tokens == 1 else min(FEW_SEQS, size.num_seqs)
        num_split = num_seqs * int((tiles * splits).max()) if is_split else 0
        num_tiles = num_seqs * most_tiles
        if tiling.is_for_prompts:
            num_prompts = min(size.num_seqs, size.mixed_tokens // tiling.min_new_tokens)
            num_tiles = min(size.mixed_tokens, size.mixed_tokens // tiling.tile_tokens + num_prompts + 1)
            num_split = min(num_split, key.most_partials // tiling.tile_tokens)
            # A combine item merges two splits or more; a split has up to `tile_tokens` partial results.
            return Room(num_tiles + num_split, num_split // 2, num_split * tiling.tile_tokens)
        # A tile is either one work item, or as many as it has splits.
        return Room(max(num_tiles, num_split), num_tiles if is_split else 0, num_split * tiling.tile_tokens)

    def has_room(self, size: DecodeSize, num_tokens: int, launch: AskedLaunch, work: WorkPlan) -> bool:
        """Return whether a mixed size has room for a launch's work items, and for the tiles of the padding tokens."""
        room, (_, _, tiling) = self.room(size, launch), launch
        padding = size.mixed_tokens - num_tokens if tiling.is_for_prompts else 0
        needed = len(work.items) + -(-padding // tiling.tile_tokens), len(work.combine_items), work.num_partials
        return all(map(le, needed, room))

    def num_columns(self, size: DecodeSize, group: int) -> int:
        """Return the columns of a group's block table."""
        spec = self._groups[group]
        if spec.is_state:
            return 1
        columns = -(-self.reach_tokens(size.level) // spec.block_size)
        if not spec.keeps_everything:
            # The group keeps the tokens that queries read and a step's new tokens. This range may begin and end inside a block, so
            # it may touch two more blocks.
            kept = (spec.window or spec.chunk) + self._max_new_tokens
            columns = min(columns, -(-kept // spec.block_size) + 2)
        return columns + spec.num_sink_blocks

    def _at_all_levels(self, shapes: Sequence[tuple[int, int]]) -> tuple[DecodeSize, ...]:
        """Return the sizes of (mixed tokens, sequences), low levels first, and the largest of each level first."""
        every = (
            DecodeSize(level=level, num_seqs=num_seqs, mixed_tokens=tokens)
            for level in range(self.num_levels)
            for tokens, num_seqs in reversed(shapes)
        )
        return tuple(size for size in every if self._has_wider_tables(size))

    def _has_wider_tables(self, size: DecodeSize) -> bool:
        """Return whether a size has wider tables than the size with as many sequences one level below."""
        return size.level == 0 or self._columns(size) != self._columns(replace(size, level=size.level - 1))

    def _columns(self, size: DecodeSize) -> list[int]:
        """Return the table columns of a size by group."""
        return [self.num_columns(size, group) for group in range(len(self._groups))]


def _buckets(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, 24, 32, 48, 64, 96 and so on, up to `most`: from 16 on, each is at most 1.5 times the one before."""
    sizes, num = [1, 2, 4, 8], 16
    while num < 2 * most:
        sizes += [num, num + num // 2]
        num *= 2
    return (*(size for size in sizes if size < most), most)
