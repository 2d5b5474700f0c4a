"""The messages between the two workers of a KV transfer. Plain data, pickled by Ray; numpy arrays carry the bytes of blocks.

target                                   source
  | ---- open_export(PrefixQuery) ------->  | finds the prefix, references its live blocks for a lease
  | <--- PrefixOffer ---------------------  |
  | ---- read_export(BlockRange) -------->  | once for each piece; each renews the lease
  | <--- one array for each rank ---------  |
  | ---- close_export ------------------->  | gives the references back

Where both sides can (`PrefixQuery.shares`, `PrefixOffer.memories`), the target's ranks read the blocks out of the memory of the
source's ranks, and `read_export` is not called. The offer has digests of some blocks, with which the target compares what it read.
It also says how long the source keeps all blocks; what was read within that time, counted from before `open_export`, is valid.

A prefill worker offers the blocks of a prompt unasked, between steps (`PrefixPeers.fetch_early`): the decode worker would wait for
the next step. It cannot know when the lease began, so what it read is valid if `close_export` says so.
"""

from dataclasses import dataclass

from transom_core.contract import WindowPolicy
from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.kv_shares import KvShares

PIECE_BYTES = 16 * 2**20
"""The most bytes of one `read_export`, of all ranks together, and the most of a rank that are read or written between two steps, so
that these wait only a moment. A larger block is a piece of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegion:
    """A rank's memory of one tier. Block `b` of group `g` begins at `address + b * strides[g]`, in bytes.

    `kind` is NIXL's name of the memory, "DRAM" or "VRAM", and `device` the number of the GPU, 0 for DRAM.
    """

    address: int
    kind: str
    device: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What other workers' ranks need to read a rank's memory: its regions by tier, and how its NIXL agent is reached.

    Who has `agent` can read the regions, so it travels between the workers of one application alone.
    """

    agent: bytes  # the agent's metadata
    regions: dict[int, MemoryRegion]


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
    shares: KvShares | None = None  # what blocks of the target's ranks hold, if these can read the source's memory
    is_early: bool = False  # until the source has the whole chain, only groups that keep every token are wanted
    is_probe: bool = False  # the chain is made up, to measure how fast cached blocks of any prefixes come
    verifies_all: bool = False  # the target wants the digests of all blocks that it reads, not of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffer:
    """What the source has: its live blocks at the longest boundary of the query.

    `blocks[g]` are the logical indices of group `g`'s blocks that can be read. With the same blocks in its cache the target has the
    hit that the source would have. `shares` says what the blocks of each of the source's ranks contain.

    `memories` are the memories of the source's ranks, if the target may read them; then `places[g]` are the (tier, block id) of
    `blocks[g]`. The contents stay what they are until the export ends. `digests[g]` has, by logical index, the digests of some of
    these blocks as each of the target's ranks should read them (`block_format.block_digest`). The export first lasts `lease_s`
    seconds.
    """

    export_id: str
    num_hash_blocks: int
    start: int  # the first token to compute after the prefix; below its end where windows must be repaired
    blocks: tuple[tuple[int, ...], ...]
    shares: KvShares
    memories: tuple[RankMemory, ...] = ()
    places: tuple[tuple[tuple[int, int], ...], ...] = ()
    digests: tuple[dict[int, tuple[bytes, ...]], ...] = ()
    lease_s: float = 0.0
    has_windows: bool = True  # not only groups that keep every token
    num_held: int = 0  # of these groups, the blocks of so many hash blocks are left out, since the target has them


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks of one group of an export to read, by their logical indices."""

    group: int
    blocks: tuple[int, ...]
