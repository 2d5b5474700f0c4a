"""Where every block lies: bytes inside a block, blocks inside a page, pages inside the slab.

One slab of bytes per rank, cut into pages; a page is leased to one group at a time. Block `b` of group `g` starts at byte
`b * stride_g`; page `p` owns the first ids that lie wholly inside it, as many in every page, so that counts of pages and of blocks
translate exactly. The integer side (`ArenaLayout`) is the same on every rank; byte strides are a rank's own. Behind the last page
lies one dump block per group, where padded or masked rows write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from transom_worker.errors import ConfigError
from transom_worker.kvcache.groups import GroupKind, GroupSpec

BLOCK_ALIGNMENT_BYTES = 256


class Role(StrEnum):
    """What the rows of a layer's tensors are."""

    KV = "kv"  # keys and values by token
    COMPRESSED = "compressed"  # keys and values by compressed entry
    INDEXER = "indexer"  # an indexer's keys by compressed entry
    STATE = "state"  # a compressor's (kv, gate) by token
    INDEXER_STATE = "indexer_state"  # an indexer's compressor's, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One layer's part of a block: K is [num_kv_heads, rows, k_size] at `k_offset` bytes, V likewise.

    `v_offset` equals `k_offset` where one tensor serves as both. `dtype` is torch's name of it, such as "bfloat16"; "uint8" for
    rows whose bytes only kernels understand.
    """

    layer: int
    role: Role = Role.KV
    num_kv_heads: int
    k_size: int
    v_size: int
    dtype: str
    k_offset: int
    v_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """One group's block: `block_bytes` of content, starting every `stride_bytes`."""

    spec: GroupSpec
    block_bytes: int
    stride_bytes: int
    layers: tuple[LayerTensors, ...]

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row of its tensors stands for: 1, or those of a compressed entry."""
        return self.spec.ratio if self.spec.kind in (GroupKind.COMPRESSED, GroupKind.INDEXER) else 1

    @property
    def rows_per_block(self) -> int:
        """Rows of each tensor in a block."""
        return self.spec.block_size // self.tokens_per_row


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """The slab: `num_pages` pages of `page_bytes`, then one dump block per group."""

    page_bytes: int
    num_pages: int
    groups: tuple[GroupLayout, ...]

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_bytes * self.num_pages

    @property
    def slab_bytes(self) -> int:
        """Bytes to allocate: the pages and the dump blocks behind them."""
        return max(
            ((self.dump_block(g) + 1) * group.stride_bytes for g, group in enumerate(self.groups)),
            default=0,
        )

    def dump_block(self, group: int) -> int:
        """The group's block id behind the last page: written by masked rows, never read."""
        return -(-self.pool_bytes // self.groups[group].stride_bytes)

    def first_block(self, page: int, group: int) -> int:
        """First block id of `group` that lies wholly inside `page`."""
        return -(-page * self.page_bytes // self.groups[group].stride_bytes)

    def end_block(self, page: int, group: int) -> int:
        """One past the last block id of `group` that `page` owns."""
        return self.first_block(page, group) + self.blocks_per_page(group)

    def blocks_per_page(self, group: int) -> int:
        """Block ids of `group` that every page owns: those that even the worst-placed page holds wholly."""
        return blocks_inside(self.page_bytes, self.groups[group].stride_bytes)

    def num_block_ids(self, group: int) -> int:
        """Ids that kernels may address: everything up to and with the dump block."""
        return self.dump_block(group) + 1


def blocks_inside(page_bytes: int, stride_bytes: int) -> int:
    """Blocks that lie wholly inside any page: placements are multiples of the two sizes' common divisor."""
    return max(0, page_bytes - stride_bytes + math.gcd(page_bytes, stride_bytes)) // stride_bytes


def check_block_sizes(layout: ArenaLayout, unit: int) -> None:
    """Whether blocks and the units in which prefixes are hashed fit into each other; ConfigError if not."""
    for group in layout.groups:
        spec = group.spec
        allowed = max(unit, spec.ratio) if spec.keeps_everything else unit
        if spec.block_size != allowed or (spec.ratio and unit % spec.ratio and spec.ratio % unit):
            entry = f" and entries of {spec.ratio}" if spec.ratio else ""
            raise ConfigError(
                f"KV group {spec.name} has blocks of {spec.block_size} tokens{entry}, and prefixes are hashed in units of "
                f"{unit}; give --block-size a power of two, so that units and entries fit into each other."
            )
