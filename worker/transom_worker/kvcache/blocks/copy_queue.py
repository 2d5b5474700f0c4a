"""`CopyQueue`: the block copies that the ranks must make, in the order in which the cache has queued them.

All copies of all plans take effect in this order. So a block may be the source of one copy and the target of a later one: its old
contents are copied to the host before new contents replace them.

A *load* is an asynchronous copy from the host to the device, or from the disk to the host. All its copies have *tickets*, numbers
above 0; until the ranks have reported them, no other copy and no step reads or writes the load's blocks. So a load may be queued
later than copies that came after it: clients take turns at loads (`load_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from transom_core.client_queue import Sharer
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.tiers import DEVICE, DISK
from transom_worker.kvcache.blocks.block_copies import BlockCopy
from transom_worker.kvcache.blocks.load_turns import LoadTurns


class CopyQueue:
    """Collects copies until a plan takes them; `waiting` has those that no plan carries yet, without the loads that wait for their
    turn.

    `block_bytes` are the bytes of a group's block; `rates()` returns the present load rates, None without a host tier.
    """

    def __init__(self, block_bytes: Sequence[int], rates: Callable[[], LoadRates | None]) -> None:
        self.waiting: list[BlockCopy] = []
        next_ticket = count(1).__next__
        self.loads = LoadTurns(block_bytes, lambda: _known(rates()).block_ns, next_ticket)  # from the host
        self.reads = LoadTurns(block_bytes, lambda: _known(rates()).read_ns, next_ticket)  # from the disk

    def add(
        self, group: int, source: int, target: int, *, source_tier: int = DEVICE, target_tier: int = DEVICE
    ) -> None:
        """Queue a copy that is made before the next forward pass."""
        self.waiting.append(BlockCopy(group, source, target, source_tier, target_tier))

    def add_store(self, group: int, block: int, tier: int, digest: bytes) -> None:
        """Queue a copy of a block of this tier to the disk. The ranks read its contents before a later copy overwrites them."""
        self.waiting.append(BlockCopy(group, block, 0, tier, DISK, digest=digest))

    def add_load(self, copies: Sequence[BlockCopy], sharer: Sharer) -> int:
        """Queue the copies of one load for their client's turns, and return its ticket."""
        ticket = (self.reads if copies[0].source_tier == DISK else self.loads).add(copies, sharer)
        self._send_due()
        return ticket

    def ended(
        self, loaded: Sequence[int], load_s: Sequence[float], failed: Sequence[int], *, step_s: float = 0.0
    ) -> tuple[list[int], list[float], list[int]]:
        """Note the pieces of loads that a step's result reports; return the same three lists of the loads that have ended so.

        `step_s` is how long the step took, without its copies.
        """
        for turns in (self.loads, self.reads):
            turns.stepped(step_s)
        reports = [*zip(loaded, load_s, strict=True), *((ticket, 0.0) for ticket in failed)]
        ended = [
            load
            for at, (ticket, seconds) in enumerate(reports)
            for turns in (self.loads, self.reads)
            if (load := turns.ended(ticket, seconds, has_failed=at >= len(loaded))) is not None
        ]
        self._send_due()
        whole = [load for load in ended if not load.has_failed]
        return (
            [load.ticket for load in whole],
            [load.seconds for load in whole],
            [load.ticket for load in ended if load.has_failed],
        )

    def clear(self) -> None:
        """Forget all copies, since the ranks were restarted."""
        self.waiting = []
        self.loads.clear()
        self.reads.clear()

    def take(self) -> list[BlockCopy]:
        """Return the copies since the last call, in order; the next plan must carry them."""
        copies, self.waiting = self.waiting, []
        return copies

    def _send_due(self) -> None:
        self.waiting += self.loads.take_due() + self.reads.take_due()


def _known(rates: LoadRates | None) -> LoadRates:
    assert rates is not None  # there are loads, so there is a host tier
    return rates
