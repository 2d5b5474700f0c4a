"""`PrefixIndex`: finds a cached block by digest, per tier and KV cache group, and remembers digests that were evicted.

A block that has several hash blocks is found under the digest of its last one. A block that moves between device and host tier
leaves one tier's maps and enters the other's; a sliding group's block may be in both, if checkpoints of both tiers need it. Without
a host tier the host's maps stay empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from transom_core.kv_cache.tiers import DEVICE, HOST

REMEMBERED_EVICTIONS = 262_144  # digests, to tell an evicted prefix from one that was never seen

GroupMaps = tuple[dict[bytes, int], ...]  # per group a map from digest to block id


class PrefixIndex:
    """Has, per tier and group, a map from digests to blocks, which `BlockRegistry` fills. A tier never has two blocks of equal
    content."""

    def __init__(self, num_groups: int, *, remembered: int = REMEMBERED_EVICTIONS) -> None:
        self.tiers: tuple[GroupMaps, ...] = tuple(tuple({} for _ in range(num_groups)) for _ in (DEVICE, HOST))
        self._remembered = remembered
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def groups(self) -> GroupMaps:
        """The device's maps, by group."""
        return self.tiers[DEVICE]

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether any tier has a block of the group under the digest."""
        return any(digest in groups[group] for groups in self.tiers)

    def forget(self, group: int, digests: Sequence[bytes], *, tier: int = DEVICE) -> None:
        """Remove from a tier blocks that the other tier has, or that are not worth remembering."""
        found = self.tiers[tier][group]
        for digest in digests:
            del found[digest]

    def remove(self, group: int, digests: Sequence[bytes], *, tier: int = DEVICE) -> None:
        """Remove blocks from a tier, and remember their digests as evicted; only the last `remembered` digests are kept."""
        evicted = self._evicted
        self.forget(group, digests, tier=tier)
        evicted.update(dict.fromkeys(digests))
        while len(evicted) > self._remembered:
            evicted.popitem(last=False)

    def num_seen(self, digests: Sequence[bytes], begin: int, end: int) -> int:
        """Return how many consecutive digests of `[begin, end)`, from the first on, are or recently were in the index of any
        group.
        """
        maps = [found for groups in self.tiers for found in groups]
        for at in range(begin, end):
            digest = digests[at]
            if digest not in self._evicted and not any(digest in found for found in maps):
                return at - begin
        return max(0, end - begin)
