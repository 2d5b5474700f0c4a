"""`PrefixIndex`: finds a cached block by digest, per KV cache group, and remembers digests that were evicted.

A digest names a hash block (`--block-size` tokens) and all tokens before it (`hashing`). A block that has several hash blocks is
found under the digest of its last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Per group a map from digest to block id, which `BlockRegistry` fills. Of blocks with equal content the index has one."""

    def __init__(self, num_groups: int, *, remembered: int) -> None:
        self.groups: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self._remembered = remembered
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def remove(self, group: int, digests: Sequence[bytes]) -> None:
        """Remove blocks from the index; remember their digests as evicted, at most `remembered` of them, the latest ones."""
        found, evicted = self.groups[group], self._evicted
        for digest in digests:
            del found[digest]
            evicted[digest] = None
        while len(evicted) > self._remembered:
            evicted.popitem(last=False)

    def num_seen(self, digests: Sequence[bytes], begin: int, end: int) -> int:
        """Return how many consecutive digests of `[begin, end)`, from the first on, are or recently were in the index of any
        group.
        """
        for at in range(begin, end):
            digest = digests[at]
            if digest not in self._evicted and not any(digest in found for found in self.groups):
                return at - begin
        return max(0, end - begin)
