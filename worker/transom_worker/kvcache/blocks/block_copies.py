"""`BlockCopy` and `CopyQueue`: the block copies that the ranks must make, in the order in which the cache has queued them.

All copies of all plans take effect in this order. So a block may be the source of one copy and the target of a later one: its old
contents are copied to the host before new contents replace them.

A *load* is an asynchronous copy from the host to the device, or from the disk to the host. All copies of one load have the same
*ticket*, a number above 0; until the ranks have reported the ticket, no other copy and no step reads or writes the load's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transom_core.kv_cache.tiers import DEVICE, DISK


class BlockCopy(NamedTuple):
    """A copy of the contents of block `source` to block `target` of the same group.

    With ticket 0 it is made before the next forward pass. On the disk, `digest` names the block, and that end's id is 0.
    """

    group: int
    source: int
    target: int
    source_tier: int = DEVICE
    target_tier: int = DEVICE
    ticket: int = 0
    digest: bytes = b""


class CopyQueue:
    """Collects copies until a plan takes them; `waiting` has those that no plan carries yet."""

    def __init__(self) -> None:
        self.waiting: list[BlockCopy] = []
        self._next_ticket = 1

    def add(
        self, group: int, source: int, target: int, *, source_tier: int = DEVICE, target_tier: int = DEVICE
    ) -> None:
        """Queue a copy that is made before the next forward pass."""
        self.waiting.append(BlockCopy(group, source, target, source_tier, target_tier))

    def add_store(self, group: int, block: int, tier: int, digest: bytes) -> None:
        """Queue a copy of a block of this tier to the disk. The ranks read its contents before a later copy overwrites them."""
        self.waiting.append(BlockCopy(group, block, 0, tier, DISK, digest=digest))

    def add_load(self, copies: Sequence[BlockCopy]) -> int:
        """Queue the copies of one load, and return its ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self.waiting += [copy._replace(ticket=ticket) for copy in copies]
        return ticket

    def take(self) -> list[BlockCopy]:
        """Return the copies since the last call, in order; the next plan must carry them."""
        copies, self.waiting = self.waiting, []
        return copies
