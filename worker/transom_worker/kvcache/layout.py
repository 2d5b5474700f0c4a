"""Where every block lies: bytes inside a block, blocks inside a page, pages inside the slab.

One slab of bytes per rank, cut into pages; a page is leased to one group at a time. Block `b` of group `g` starts at byte
`b * stride_g`; page `p` owns the ids that lie wholly inside it. The integer side (`ArenaLayout`) is the same on every rank;
byte strides are a rank's own. Behind the last page lies one dump block per group, where padded or masked rows write.
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_worker.kvcache.groups import GroupSpec

BLOCK_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One layer's part of a block: K is [num_kv_heads, block_size, k_size] at `k_offset` bytes, V likewise.

    `v_offset` equals `k_offset` where one tensor serves as both. `dtype` is torch's name of it, such as "bfloat16".
    """

    layer: int
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
        """One past the last block id of `group` that lies wholly inside `page`."""
        return (page + 1) * self.page_bytes // self.groups[group].stride_bytes

    def num_block_ids(self, group: int) -> int:
        """Ids that kernels may address: everything up to and with the dump block."""
        return self.dump_block(group) + 1
