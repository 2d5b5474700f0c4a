"""What ranks do with blocks, in plain Python: tables kept up by deltas and moves, and a slab that remembers what was written."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.blocks.block_copies import BlockCopy

Content = Any  # what a position's slot has


@dataclass
class RankTable:
    """One sequence's block table in one group: sink blocks, then a run, by ascending logical index.

    `aside` has the blocks that left the table of a sequence whose policy is measured.
    """

    num_sink_blocks: int
    keeps_aside: bool = False
    blocks: dict[int, int] = field(default_factory=dict)  # logical -> id
    aside: dict[int, int] = field(default_factory=dict)
    end: int = 0  # one past the last logical block that there ever was

    def apply(self, dropped: int, appended: list[int], first_block: int) -> None:
        run = [logical for logical in self.blocks if logical >= self.num_sink_blocks]
        assert dropped <= len(run)
        for logical in run[:dropped]:
            self.remove(logical)
        begin = max(self.end, first_block) if self.end >= self.num_sink_blocks else self.end
        for block in appended:
            if begin == self.num_sink_blocks:
                begin = max(begin, first_block)
            self.blocks[begin] = block
            begin += 1
        self.end = max(self.end, begin)
        run = [logical for logical in self.blocks if logical >= self.num_sink_blocks]
        assert not run or run[0] >= first_block

    def remove(self, logical: int) -> None:
        block = self.blocks.pop(logical)
        if self.keeps_aside:
            self.aside[logical] = block

    def replace(self, logical: int, block: int) -> None:
        table = self.blocks if logical in self.blocks else self.aside
        assert logical in table
        table[logical] = block


class Slab:
    """Contents by block and offset. A page's bytes belong to the group that wrote there last: what others wrote is gone."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._contents: list[dict[int, dict[int, Content]]] = [{} for _ in layout.groups]
        self._writer: dict[int, int] = {}  # by page

    def read(self, group: int, position: int, block: int) -> Content | None:
        return self._contents[group].get(block, {}).get(position % self._layout.groups[group].spec.block_size)

    def at(self, group: int, position: int, block: int) -> Content:
        """What was written for a position, which must be there."""
        return self._contents[group][block][position % self._layout.groups[group].spec.block_size]

    def block(self, group: int, block: int) -> list[Content]:
        """A whole block's contents, as far as there are any, in order."""
        return [content for _, content in sorted(self._contents[group].get(block, {}).items())]

    def write(self, group: int, position: int, block: int, content: Content) -> None:
        self._claim(group, block)
        offset = position % self._layout.groups[group].spec.block_size
        self._contents[group].setdefault(block, {})[offset] = content

    def contents(self, group: int, block: int) -> dict[int, Content]:
        return dict(self._contents[group].get(block, {}))

    def put(self, group: int, block: int, contents: dict[int, Content]) -> None:
        """The block then has these contents by offset and nothing else."""
        self._claim(group, block)
        self._contents[group][block] = contents

    def _claim(self, group: int, block: int) -> None:
        page = block * self._layout.groups[group].stride_bytes // self._layout.page_bytes
        before = self._writer.setdefault(page, group)
        if before != group:
            self._writer[page] = group
            for other in range(self._layout.first_block(page, before), self._layout.end_block(page, before)):
                self._contents[before].pop(other, None)


def copy_blocks(slabs: Sequence[Slab], copies: Iterable[BlockCopy]) -> None:
    """Make the copies, one after the other, between slabs by tier."""
    for copy in copies:
        contents = slabs[copy.source_tier].contents(copy.group, copy.source)
        slabs[copy.target_tier].put(copy.group, copy.target, contents)


def prefix_tags(token_ids: Sequence[int], root: bytes = b"") -> list[bytes]:
    """By position, a digest of the tokens up to it, and of what separates sequences with equal tokens."""
    digest = hashlib.sha256(root)
    tags = []
    for token in token_ids:
        digest.update(token.to_bytes(4, "little"))
        tags.append(digest.digest()[:8])
    return tags
