"""Which block holds which unit of which chain, by group; and a bounded memory of digests that are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Per group a map from chain digest to block id, which `BlockRegistry` fills; equal blocks are indexed once."""

    def __init__(self, num_groups: int, *, remembered: int) -> None:
        self.groups: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._remembered = remembered
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def remove(self, group: int, digests: Sequence[bytes]) -> None:
        """Forget blocks, remember that their digests were once here (the oldest memories go)."""
        found, evicted = self.groups[group], self._evicted
        for digest in digests:
            del found[digest]
            evicted[digest] = None
        while len(evicted) > self._remembered:
            evicted.popitem(last=False)

    def num_seen(self, digests: Sequence[bytes], begin: int, end: int) -> int:
        """How many consecutive digests from `begin` are, or were not long ago, in any group."""
        for at in range(begin, end):
            digest = digests[at]
            if digest not in self._evicted and not any(digest in found for found in self.groups):
                return at - begin
        return max(0, end - begin)
