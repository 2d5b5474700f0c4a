"""`ArenaLayout`: the byte positions of all KV blocks: tensors inside a block, blocks inside a page, pages inside a rank's slab.

Terms:

    rank      one process of a tensor-parallel worker
    slab      the KV memory of one rank; it is divided into *pages*
    stride    the distance in bytes between the starts of a group's blocks
    dump      a block after the last page to which padded or masked rows write, and which no query reads

A page is leased to one group at a time. Block `b` of group `g` starts at byte `b * stride_g`. A page has the first ids whose blocks
are wholly inside it, the same number in every page, so that counts of pages and of blocks translate exactly. Example: pages of
1,000 bytes, blocks of 300 bytes. Page 1 (bytes 1,000 to 2,000) can have blocks 4 and 5 alone, so each page has 2 blocks: page 0 has
0 and 1, and the ids 2 and 3 belong to no page.

Page numbers and block ids are the same on every rank; the contents of a block differ, since each rank has its own KV heads. After
the last page comes one dump block per group.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec

BLOCK_ALIGNMENT_BYTES = 256
# Bytes of one element.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}


class Role(StrEnum):
    """What one row of a layer's tensor is."""

    KV = "kv"  # keys and values by token; in a convolution its gated inputs
    COMPRESSED = "compressed"  # keys and values by compressed entry
    INDEXER = "indexer"  # an indexer's keys by compressed entry
    STATE = "state"  # a compressor's (kv, gate) by token
    INDEXER_STATE = "indexer_state"  # the (kv, gate) of an indexer's compressor, by token
    # What a snapshot of a recurrent layer has: a state for each head, and, for each of the last tokens, the convolution's inputs: a
    # tensor of queries and keys by key head, then one of values by head. These follow each other without gaps.
    RECURRENT = "recurrent"
    CONVOLVED_KEYS = "convolved_keys"
    CONVOLVED_VALUES = "convolved_values"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One layer's part of a block: K is [num_kv_heads, rows, k_size] at byte `k_offset`, V [num_kv_heads, rows, v_size] at
    `v_offset`.

    `v_offset` equals `k_offset` if one tensor serves as both. `dtype` is torch's name of an element, such as "bfloat16", and sizes
    count such elements. Quantised keys and values (fp8, int8, int4) have float32 scales [num_kv_heads, rows] at `k_scale_offset`
    and `v_scale_offset`; int4 keeps two values in an element of "uint8". "uint8" without scales means rows that mix formats. Of
    tensors `by_state`, `num_kv_heads` counts heads with states.
    """

    layer: int
    role: Role = Role.KV
    num_kv_heads: int
    k_size: int
    v_size: int
    dtype: str
    k_offset: int
    v_offset: int
    k_scale_offset: int | None = None
    v_scale_offset: int | None = None

    @property
    def by_state(self) -> bool:
        """Return whether it has a part for each head with a state, of which a key head may serve several."""
        return self.role in (Role.RECURRENT, Role.CONVOLVED_VALUES)

    @property
    def format(self) -> str:
        """Return the number format as a user names it: fp8, int8, int4, or torch's name."""
        if self.dtype == "uint8":
            return "fp8" if self.k_scale_offset is None else "int4"
        return "fp8" if self.dtype == "float8_e4m3fn" else self.dtype

    @property
    def hadamard(self) -> bool:
        """Return whether keys are stored multiplied by a Hadamard matrix, which spreads their outlier channels; queries are then
        multiplied by it too."""
        return self.format == "int4"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """One group's block: `block_bytes` of content, starting every `stride_bytes`."""

    spec: GroupSpec
    block_bytes: int
    stride_bytes: int
    layers: tuple[LayerTensors, ...]

    @property
    def tokens_per_row(self) -> int:
        """Return the number of tokens that one row of the group's tensors stands for: 1, the tokens of a compressed entry, or all
        tokens of a block that is a snapshot."""
        if self.spec.is_state:
            return self.spec.block_size
        return self.spec.ratio if self.spec.kind in (GroupKind.COMPRESSED, GroupKind.INDEXER) else 1

    @property
    def rows_per_block(self) -> int:
        """Return the number of rows of each tensor in a block."""
        return self.spec.block_size // self.tokens_per_row

    @property
    def format(self) -> str:
        """Return the number format of the group's keys and values, or of its first tensor; "" if no tensors are known."""
        return self.layers[0].format if self.layers else ""

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of a block per token, with scales and without padding."""
        return self.block_bytes / self.spec.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """A slab: `num_pages` pages of `page_bytes` bytes, then one dump block per group."""

    page_bytes: int
    num_pages: int
    groups: tuple[GroupLayout, ...]

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of all pages."""
        return self.page_bytes * self.num_pages

    @property
    def slab_bytes(self) -> int:
        """Return the bytes to allocate: the pages and the dump blocks after them."""
        return max(((self.dump_block(g) + 1) * group.stride_bytes for g, group in enumerate(self.groups)), default=0)

    def dump_block(self, group: int) -> int:
        """Return the group's block id after the last page: masked rows write to it, and no query reads it."""
        return -(-self.pool_bytes // self.groups[group].stride_bytes)

    def first_block(self, page: int, group: int) -> int:
        """Return the first block id of `group` that begins inside `page`."""
        return -(-page * self.page_bytes // self.groups[group].stride_bytes)

    def end_block(self, page: int, group: int) -> int:
        """Return one past the last block id of `group` that belongs to `page`."""
        return self.first_block(page, group) + self.blocks_per_page(group)

    def blocks_per_page(self, group: int) -> int:
        """Return how many blocks of `group` every page has: the number that fits in any page, wherever its first block begins."""
        return blocks_inside(self.page_bytes, self.groups[group].stride_bytes)

    def num_block_ids(self, group: int) -> int:
        """Return the number of block ids that kernels may address, the dump block included."""
        return self.dump_block(group) + 1


def blocks_inside(page_bytes: int, stride_bytes: int) -> int:
    """Return how many blocks lie wholly inside any page. All starts are multiples of gcd(page, stride), so the first block that
    begins in a page does so at most `stride - gcd` bytes after the page's start."""
    return max(0, page_bytes - stride_bytes + math.gcd(page_bytes, stride_bytes)) // stride_bytes


def check_block_sizes(layout: ArenaLayout, block_size: int) -> None:
    """Check that each group's blocks and the hash blocks of `block_size` tokens fit into each other; raise ConfigError if not."""
    for group in layout.groups:
        spec = group.spec
        allowed = max(block_size, spec.ratio) if spec.keeps_everything else block_size
        if spec.block_size != allowed or (spec.ratio and block_size % spec.ratio and spec.ratio % block_size):
            entry = f" and entries of {spec.ratio}" if spec.ratio else ""
            raise ConfigError(
                f"KV group {spec.name} has blocks of {spec.block_size} tokens{entry}, and prefixes are hashed in blocks of "
                f"{block_size}; give --block-size a power of two, so that blocks and entries fit into each other."
            )
