"""The messages between the two workers of a KV transfer. Plain data, pickled by Ray; numpy arrays carry the bytes of blocks.

target                                   source
  | ---- open_export(PrefixQuery) ------->  | finds the prefix, references its live blocks for a lease
  | <--- PrefixOffer ---------------------  |
  | ---- read_export(BlockRange) -------->  | once for each piece; each renews the lease
  | <--- one array for each rank ---------  |
  | ---- close_export ------------------->  | gives the references back
"""

from __future__ import annotations

from dataclasses import dataclass

from transom_core.contract import WindowPolicy
from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.kv_shares import KvShares

MAX_PIECE_BYTES = 16 * 2**20
"""The most bytes of one `read_export`, of all ranks together; a larger block is a piece of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixQuery:
    """Which prefix the target wants: the digests of its hash blocks from the first one on, and the target's cache groups.

    A digest depends on the model's identity, the tokens, the tenant's salt and the KV policy, but not on the memory layout. So the
    two workers' groups must be equal too; their numbers of ranks may differ. A source of another `identity` refuses the query.
    Under a `kv_policy` the live blocks are those of its window, in every group.
    """

    chain: tuple[bytes, ...]
    num_tokens: int  # the length of the hit that the router expects at the source
    groups: tuple[GroupSpec, ...]
    block_size: int  # tokens of a hash block
    identity: str = ""  # the identity of the target's model
    kv_policy: WindowPolicy | None = None  # the request's; blocks under policies of other kinds are never shared


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffer:
    """What the source has: its live blocks at the longest boundary of the query.

    `blocks[g]` are the logical indices of group `g`'s blocks that can be read. With the same blocks in its cache the target has the
    hit that the source would have. `shares` says what the blocks of each of the source's ranks contain.
    """

    export_id: str
    num_hash_blocks: int
    start: int  # the first token to compute after the prefix; below its end where windows must be repaired
    blocks: tuple[tuple[int, ...], ...]
    shares: KvShares


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks of one group of an export to read, by their logical indices."""

    group: int
    blocks: tuple[int, ...]
