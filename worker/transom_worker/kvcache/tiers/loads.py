"""`Loads`: brings blocks from the host tier to the device for sequences that hit them or were swapped, while other sequences run.

    hole      a logical block of a sequence whose contents are in the host tier and not on the device
    load      the copies that fill all holes of one sequence
    ticket    the number of a load in step plans and step results

    cache.begin          the sequence references its blocks on the device, and counts a need of those in the host tier
    cache.start_load     a block on the device is allocated for each hole, and the copies are queued (`start`)
    (the ranks copy)     nothing else may move, read or write these blocks
    cache.finish_load    the ranks have reported the ticket: publish the blocks on the device, release those of the host (`finish`)

The digests of a running load's blocks are known, so that another sequence can wait for the load instead of loading them again.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.block_copies import BlockCopy, CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.sequence_blocks import BlocksState, PendingLoad, SequenceBlocks
from transom_worker.kvcache.tiers.host_tier import HostTier


@dataclass(slots=True, eq=False)
class Load:
    """One sequence's load. `is_void` is set when the cache is emptied meanwhile, or the load cut: then the blocks must not be
    published, neither by the load nor by its sequence (`lost_contents`).

    The last `num_cut` copies are never sent, because the sequence has ended.

    `digests[group]` has the digests of the blocks that the load brings. Blocks of a swapped sequence are not published in the host
    tier, so their load has empty sets.
    """

    blocks: SequenceBlocks
    copies: list[BlockCopy]
    digests: list[set[bytes]]
    is_void: bool = False
    num_cut: int = 0

    @property
    def sent_copies(self) -> list[BlockCopy]:
        """The copies that the ranks make."""
        return self.copies[: len(self.copies) - self.num_cut]


class Loads:
    """Starts and finishes loads; `by_ticket` has those that the ranks have not reported yet."""

    def __init__(self, registry: BlockRegistry, host: HostTier, copies: CopyQueue) -> None:
        self.by_ticket: dict[int, Load] = {}
        self.num_loaded = [0] * len(host.pools)  # blocks by group, since start
        self._registry = registry
        self._host = host
        self._copies = copies

    def start(self, blocks: SequenceBlocks, targets: Sequence[Sequence[int]]) -> None:
        """Put the allocated blocks `targets[group]` of the device into a sequence's holes, and queue the copies into them."""
        copies: list[BlockCopy] = []
        digests: list[set[bytes]] = []
        host_blocks = blocks.load.host_blocks
        for group, (sources, of_group) in enumerate(zip(host_blocks, targets, strict=True)):
            blocks.tables[group].fill_holes(of_group)
            copies += [
                BlockCopy(group, source, target, HOST, DEVICE) for source, target in zip(sources, of_group, strict=True)
            ]
            published = self._host.pools[group].published
            digests.append({published[source][0] for source in sources if source in published})
        ticket = self._copies.add_load(copies, blocks.sharer)
        blocks.move_to(BlocksState.LOADING, PendingLoad(host_blocks, ticket))
        self.by_ticket[ticket] = Load(blocks, copies, digests)

    def bringing_most(self, lacking: Sequence[set[bytes]]) -> tuple[Load, list[int]] | None:
        """Return the load that brings the most of the blocks that a sequence lacks, and how many of each group it brings.

        `lacking[group]` has the digests of the blocks that the sequence lacks. None: no load brings any of them.
        """
        brought = [
            (load, [len(digests & wanted) for digests, wanted in zip(load.digests, lacking, strict=True)])
            for load in self.by_ticket.values()
            if not load.is_void
        ]
        most = max(brought, key=lambda one: sum(one[1]), default=None)
        return most if most is not None and any(most[1]) else None

    def finish(self, ticket: int) -> Load | None:
        """Publish the blocks that a load has brought and release the host's blocks; return the load, None for an unknown ticket."""
        load = self.by_ticket.pop(ticket, None)
        if load is None:
            return None
        for copy in load.sent_copies:
            self.num_loaded[copy.group] += 1
            name = self._host.pools[copy.group].published.get(copy.source)
            if name is not None and not load.is_void and not self._registry.has(copy.group, name[0]):
                self._registry.enter(copy.group, [copy.target], [name])
        self._end(load)
        return load

    def cancel(self, ticket: int) -> bool:
        """Do not send the pieces of a load that still wait for their turn, since its sequence has ended, and publish nothing of it.

        Return whether the load may be finished at once, because the ranks have nothing of it.
        """
        turns = self._copies.loads
        load = self.by_ticket[ticket]
        load.num_cut = turns.num_waiting(ticket)
        if not load.num_cut:
            return False
        load.is_void = load.blocks.lost_contents = True
        return not turns.cut(ticket)

    def send_again(self, tickets: Iterable[int]) -> None:
        """Queue the copies of these loads again under new tickets, because the ranks may not have received the plans that carried
        the given tickets."""
        for ticket in self._copies.loads.withdraw(tickets):
            load = self.by_ticket.pop(ticket)
            ticket = self._copies.add_load(load.sent_copies, load.blocks.sharer)
            load.blocks.load = replace(load.blocks.load, ticket=ticket)
            self.by_ticket[ticket] = load

    def make_void(self) -> None:
        """Let the running loads publish nothing when they finish."""
        for load in self.by_ticket.values():
            load.is_void = load.blocks.lost_contents = True

    def abandon(self) -> None:
        """Forget all loads, since the ranks were restarted; their sequences hold their blocks until they are released."""
        for load in list(self.by_ticket.values()):
            self._end(load)
        self.by_ticket.clear()
        self._copies.loads.clear()

    def num_blocks(self, ticket: int) -> list[int]:
        """Return how many blocks of each group a load brings; zeros for an unknown ticket or a void load, which may be cut."""
        load = self.by_ticket.get(ticket)
        copies = [] if load is None or load.is_void else load.copies
        counts = Counter(copy.group for copy in copies)
        return [counts[group] for group in range(len(self.num_loaded))]

    def release(self, blocks: SequenceBlocks) -> None:
        """Release the host's blocks that a sequence needs for its holes; the caller changes the state of `blocks`."""
        for group, sources in enumerate(blocks.load.host_blocks):
            self._host.release(group, sources)

    def _end(self, load: Load) -> None:
        """Release the host's blocks of a load; the sequence's blocks on the device are complete from now on."""
        self.release(load.blocks)
        load.blocks.move_to(BlocksState.READY)

    def targets(self) -> Iterable[tuple[int, int]]:
        """Yield (group, block) of every block on the device that a load writes."""
        for load in self.by_ticket.values():
            for copy in load.copies:
                yield copy.group, copy.target
