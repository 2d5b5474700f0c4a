"""`PrefixIndex`: finds a cached block by digest, per tier and KV cache group, and remembers digests that were evicted.

A block may contain several *hash blocks* (`--block-size` tokens with one digest); it is found under the digest of the last one. If
a block moves between device and host tier, its digest leaves one tier's map and enters the other's. A sliding group's block may be
in both, if checkpoints of both tiers need it. Without a host tier the host's maps stay empty.
"""

from collections.abc import Sequence

from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.prefix.digest_table import DigestTable

# Digests, 4 MiB. They tell an evicted prefix from one that was never cached. Of the last 100,000, one in 5,000 is forgotten,
# since a set has few places.
REMEMBERED_EVICTIONS = 2**19

GroupMaps = tuple[dict[bytes, int], ...]  # per group a map from digest to block id


class PrefixIndex:
    """The maps from digests to blocks, per tier and group; `BlockRegistry` fills them.

    Within one tier and group a digest has one block: a second block with the same content is not entered.
    """

    def __init__(self, num_groups: int, *, remembered: int = REMEMBERED_EVICTIONS) -> None:
        self.tiers: tuple[GroupMaps, ...] = tuple(tuple({} for _ in range(num_groups)) for _ in (DEVICE, HOST))
        self._evicted = DigestTable(remembered)

    @property
    def groups(self) -> GroupMaps:
        """The device's maps, by group."""
        return self.tiers[DEVICE]

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether any tier has a block of the group under the digest."""
        return any(digest in groups[group] for groups in self.tiers)

    def forget(self, group: int, digests: Sequence[bytes], *, tier: int = DEVICE) -> None:
        """Remove these digests from a tier without remembering them as evicted, because the other tier has them, for example."""
        found = self.tiers[tier][group]
        for digest in digests:
            del found[digest]

    def remove(self, group: int, digests: Sequence[bytes], *, tier: int = DEVICE) -> None:
        """Remove these digests from a tier, and remember them as evicted. About `remembered` digests are remembered."""
        self.forget(group, digests, tier=tier)
        for digest in digests:
            self._evicted.take(digest)

    def num_seen(self, digests: Sequence[bytes], begin: int, end: int) -> int:
        """Return how many digests in a row, from index `begin` on and below `end`, are in the index of any group, or were evicted
        recently."""
        maps = [found for groups in self.tiers for found in groups]
        for at in range(begin, end):
            digest = digests[at]
            if digest not in self._evicted and not any(digest in found for found in maps):
                return at - begin
        return max(0, end - begin)
