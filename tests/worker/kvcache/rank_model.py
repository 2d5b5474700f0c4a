"""What ranks do with blocks, in plain Python: tables kept up by deltas and moves, and a slab that remembers what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.blocks.block_copies import BlockCopy

Content = tuple[int, bytes]  # (position, digest of the tokens up to it)


@dataclass
class RankTable:
    """One sequence's table of one group."""

    num_sink_blocks: int
    sink_blocks: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    first_block: int = 0

    def at(self, logical: int) -> int:
        assert logical < self.num_sink_blocks or logical >= self.first_block
        return self.sink_blocks[logical] if logical < self.num_sink_blocks else self.run[logical - self.first_block]

    def apply(self, dropped: int, appended: Sequence[int], first_block: int) -> None:
        assert dropped <= len(self.run)
        del self.run[:dropped]
        missing = self.num_sink_blocks - len(self.sink_blocks)
        self.sink_blocks += appended[:missing]
        self.run += appended[missing:]
        self.first_block = first_block

    def move(self, logical: int, block: int) -> None:
        self.at(logical)  # must be there
        if logical < self.num_sink_blocks:
            self.sink_blocks[logical] = block
        else:
            self.run[logical - self.first_block] = block


class Slab:
    """Contents by block and offset. A page's bytes belong to the group that wrote there last: what others wrote is gone."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._contents: list[dict[int, dict[int, Content]]] = [{} for _ in layout.groups]
        self._writer: dict[int, int] = {}  # by page

    def read(self, group: int, position: int, block: int) -> Content | None:
        return self._contents[group].get(block, {}).get(position % self._layout.groups[group].spec.block_size)

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


def prefix_tags(token_ids: Sequence[int]) -> list[bytes]:
    """By position, a digest of the tokens up to it."""
    digest = hashlib.sha256()
    tags = []
    for token in token_ids:
        digest.update(token.to_bytes(4, "little"))
        tags.append(digest.digest()[:8])
    return tags
