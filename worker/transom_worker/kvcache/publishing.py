"""`Publishing`: makes a sequence's computed blocks findable for other requests, and places checkpoints at boundaries that it
passes.

    publish     enter a computed block into the prefix index under its digest
    checkpoint  a boundary in the prefix tree, at which the cache keeps all blocks that a request needs to continue there
    twin        another block with equal content and so an equal digest; the index has only one of the two
    private     said of a sequence whose blocks are never published, because its KV policy depends on its own attention

A *window repair* (`sequence_blocks.Repair`) computes cached tokens again for sliding groups. It computes exact contents only in the
blocks that are live at its end, since the first tokens of its range lack the keys before them; the other blocks in its range are
never published. Example with one window group, live blocks 6 and 7 at the end, and the start in block 5:

    block            0 ... 4    5         6      7      8 ...
    full group       (cached)   (cached)                publish
    window group     (none)     inexact   publish       publish
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from transom_core.kv_cache.hashing import extend_chain
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.blocks.block_table import BlockTable
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.eviction.checkpoints import Checkpoints
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.kvcache.tiers.host_tier import HostTier


@dataclass(slots=True, kw_only=True, eq=False)
class Publishing:
    """Publishes blocks in the registry and places checkpoints. If `is_on` is False (no prefix caching) it does nothing."""

    registry: BlockRegistry
    checkpoints: Checkpoints
    host: HostTier
    is_on: bool
    state_group: int | None

    def publishes(self, blocks: SequenceBlocks) -> bool:
        """Return whether a sequence's blocks are published."""
        return self.is_on and not blocks.is_private

    def expect(self, blocks: SequenceBlocks, boundaries: Sequence[tuple[int, CheckpointKind]]) -> None:
        """Plan the checkpoints that are known before a sequence is admitted: at these boundaries (in hash blocks), and where its
        chain parts from another chain that is cached in the full groups beyond the hit."""
        planned: dict[int, CheckpointKind] = {}
        if not self.publishes(blocks):
            return
        if (hit := blocks.hit) is not None:
            parted = hit.full_groups_reach > hit.num_hash_blocks or blocks.repair.is_needed
            if parted and blocks.retentions.full_groups:
                planned[hit.full_groups_reach] = CheckpointKind.FORK
        planned.update(boundaries)
        blocks.planned_checkpoints = sorted(planned.items())

    def plan(self, blocks: SequenceBlocks, boundaries: Sequence[tuple[int, CheckpointKind]], *, is_new: bool) -> None:
        """Plan an admitted sequence's checkpoints at these boundaries (in hash blocks), and one more where its chain parts from
        another chain.

        The other chain is either cached in the full groups beyond the hit, or evicted. If the request `is_new` (not admitted again
        after a preemption), the cache also learns what clients return to.
        """
        if not self.publishes(blocks):
            return
        self.expect(blocks, boundaries)
        hit = blocks.hit
        if hit is not None:
            self.checkpoints.count_hit(blocks.base_node, hit.num_hash_blocks)
            if is_new:
                continuation = self.checkpoints.learn_return(blocks.chain, hit.limit, blocks.base_node)
                blocks.num_returns = continuation.num_returns
                if continuation.parts_at is not None and continuation.parts_at > hit.num_hash_blocks:
                    self._plan_fork(blocks, continuation.parts_at)
            elif blocks.base_node is not None:
                blocks.num_returns = blocks.base_node.num_returns

    def plan_fork_checkpoint(self, blocks: SequenceBlocks, boundary: int) -> None:
        """Plan one more checkpoint, at a boundary that the sequence has yet to reach.

        Without sliding groups none is needed: all blocks stay.
        """
        if self.is_on and blocks.retentions.slides:
            self._plan_fork(blocks, boundary)

    def _plan_fork(self, blocks: SequenceBlocks, boundary: int) -> None:
        if all(boundary != planned for planned, _ in blocks.planned_checkpoints):
            insort(blocks.planned_checkpoints, (boundary, CheckpointKind.FORK))

    def publish(self, blocks: SequenceBlocks, token_ids: Sequence[int], processed: int) -> None:
        """Publish the whole blocks among the `processed` tokens that are not published yet."""
        num_whole = processed // self.registry.block_size
        nothing_new = num_whole <= blocks.num_published and not blocks.repair.is_under_way
        if not self.is_on or blocks.is_private or processed < blocks.repair.end or nothing_new:
            return
        if len(blocks.chain) < num_whole:
            extend_chain(blocks.chain, blocks.root, token_ids, self.registry.block_size)
        for group, (retention, table) in enumerate(zip(blocks.retentions, blocks.tables, strict=True)):
            begin = blocks.num_published
            if blocks.repair.is_under_way and not retention.keeps_everything:
                begin = retention.first_live_block(blocks.repair.end)
            step = retention.block_size // self.registry.block_size
            self._publish(group, table, begin // step, num_whole // step, blocks.chain)
        blocks.num_published = num_whole
        blocks.repair.is_published = True

    def place_planned(self, blocks: SequenceBlocks, processed: int) -> None:
        """Place the checkpoints whose boundaries the sequence has passed."""
        while blocks.planned_checkpoints and blocks.planned_checkpoints[0][0] <= blocks.num_published:
            boundary, kind = blocks.planned_checkpoints[0]
            if processed < boundary * self.registry.block_size or processed < blocks.repair.end:
                return
            del blocks.planned_checkpoints[0]
            self._place(blocks, boundary, kind)

    def place_last(self, blocks: SequenceBlocks, kind: CheckpointKind) -> None:
        """Place a checkpoint after the last whole hash block of a sequence that is released.

        Nothing is placed if the blocks up to there were not all published, or if their contents are unknown (`lost_contents`). With
        recurrent layers the checkpoint is the last boundary whose state is kept, if that is not the sequence's node already.
        """
        boundary = blocks.processed // self.registry.block_size
        if self.state_group is not None:
            above = blocks.base_node.boundary if blocks.base_node is not None else 0
            boundary = min(boundary, len(blocks.chain))
            while boundary > above and not self.registry.has(self.state_group, blocks.chain[boundary - 1]):
                boundary -= 1
        complete = (
            self.is_on
            and not (blocks.is_private or blocks.lost_contents)
            and blocks.processed >= blocks.repair.end
            and boundary <= blocks.num_published
        )
        if boundary and complete:
            self._place(blocks, boundary, kind)

    def _publish(self, group: int, table: BlockTable, begin: int, end: int, chain: Sequence[bytes]) -> None:
        """Publish logical blocks `[begin, end)` of a table on the device, and free the host's blocks with equal contents that
        nothing needs (leftovers)."""
        published = self.registry.publish(group, table, begin, end, chain)
        if published:
            self.host.forget_leftovers(group, published)

    def _place(self, blocks: SequenceBlocks, boundary: int, kind: CheckpointKind) -> None:
        """Place a checkpoint at a boundary up to which everything was published.

        A block that was not published because the index had its twin is published now if the twin was evicted meanwhile.
        """
        chain = blocks.chain
        owned = self.checkpoints.tree.reach_on_device(chain, boundary)
        for group, (retention, table) in enumerate(zip(blocks.retentions, blocks.tables, strict=True)):
            step = retention.block_size // self.registry.block_size
            end = boundary // step
            kept = end if retention.keeps_everything else min(end, retention.num_sink_blocks)  # pinned with the segment
            self._publish(group, table, owned // step, kept, chain)
            # What the repair computed below the blocks that are live at its end is inexact.
            first = max(kept, table.first_block, retention.first_live_block(blocks.repair.end))
            self._publish(group, table, first, end, chain)
            if not self.registry.has_all(group, chain, owned // step, kept):
                return
        blocks.base_node = self.checkpoints.place(
            chain,
            boundary,
            kind,
            retentions=blocks.retentions,
            num_returns=blocks.num_returns,
            base_node=blocks.base_node,
        )
