"""What sequences leave for others to find: whole blocks under their digests, and checkpoints at boundaries that they pass."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from transom_worker.kvcache.block_registry import BlockRegistry
from transom_worker.kvcache.checkpoints import Checkpoints
from transom_worker.kvcache.hashing import extend_chain
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.sequence import SequenceBlocks
from transom_worker.kvcache.tree import CheckpointKind


class Publishing:
    """Names blocks in the registry and places checkpoints. What a replay computed is published from its end on alone.

    Unless it `is_on` nothing is published: prefix caching is off.
    """

    def __init__(
        self,
        registry: BlockRegistry,
        checkpoints: Checkpoints,
        retentions: Sequence[Retention],
        *,
        block_size: int,
        is_on: bool,
    ) -> None:
        self._registry = registry
        self._checkpoints = checkpoints
        self._retentions = retentions
        self._block_size = block_size
        self._is_on = is_on

    def plan(self, blocks: SequenceBlocks, boundaries: Sequence[tuple[int, CheckpointKind]], *, is_new: bool) -> None:
        """A sequence is admitted: checkpoints are due at these boundaries, and at one more where chains were seen to part."""
        if not self._is_on:
            return
        planned: dict[int, CheckpointKind] = {}
        hit = blocks.hit
        if hit is not None:
            self._checkpoints.admitted(blocks.base, hit.num_hash_blocks)
            if is_new:
                blocks.turns = self._checkpoints.arrive(blocks.chain, hit.limit, blocks.base)
            elif blocks.base is not None:
                blocks.turns = blocks.base.turns
            parted = hit.full_groups_reach > hit.num_hash_blocks or blocks.repair_until > 0
            if parted and any(retention.keeps_everything for retention in self._retentions):
                planned[hit.full_groups_reach] = CheckpointKind.FORK
        planned.update(boundaries)
        blocks.planned = sorted(planned.items())

    def plan_fork_checkpoint(self, blocks: SequenceBlocks, units: int) -> None:
        """One more checkpoint is due, at this boundary ahead, if there are windows that would be gone later."""
        slides = any(not retention.keeps_everything for retention in self._retentions)
        if self._is_on and slides and all(units != planned for planned, _ in blocks.planned):
            insort(blocks.planned, (units, CheckpointKind.FORK))

    def publish(self, blocks: SequenceBlocks, token_ids: Sequence[int], processed: int) -> None:
        """Make whole blocks findable. What a replay computed is right from its end on, and so is what is live there."""
        units = processed // self._block_size
        replays = blocks.repair_until > 0 and not blocks.repaired
        if not self._is_on or processed < blocks.repair_until or (units <= blocks.num_published and not replays):
            return
        if len(blocks.chain) < units:
            extend_chain(blocks.chain, blocks.root, token_ids, self._block_size)
        for group, (retention, table) in enumerate(zip(self._retentions, blocks.tables, strict=True)):
            begin = blocks.num_published
            if replays and not retention.keeps_everything:
                begin = retention.first_live_block(blocks.repair_until)
            step = retention.block_size // self._block_size
            self._registry.name(group, table, begin // step, units // step, blocks.chain)
        blocks.num_published = units
        blocks.repaired = True

    def place_planned(self, blocks: SequenceBlocks, processed: int) -> None:
        """Place the checkpoints whose boundaries the sequence has passed."""
        while blocks.planned and blocks.planned[0][0] <= blocks.num_published:
            units, kind = blocks.planned[0]
            if processed < units * self._block_size or processed < blocks.repair_until:
                return
            del blocks.planned[0]
            self._place(blocks, units, kind)

    def place_last(self, blocks: SequenceBlocks, kind: CheckpointKind) -> None:
        """Place one at the last whole unit that an ending sequence processed, if all up to there was published."""
        units = blocks.processed // self._block_size
        complete = self._is_on and blocks.processed >= blocks.repair_until and units <= blocks.num_published
        if units and complete:
            self._place(blocks, units, kind)

    def _place(self, blocks: SequenceBlocks, units: int, kind: CheckpointKind) -> None:
        """A checkpoint at a boundary up to which everything was published; blocks whose twins went are named again."""
        chain = blocks.chain
        owned = self._checkpoints.tree.reach(chain, units)
        for group, (retention, table) in enumerate(zip(self._retentions, blocks.tables, strict=True)):
            step = retention.block_size // self._block_size
            end = units // step
            kept = end if retention.keeps_everything else min(end, retention.num_sink_blocks)  # with the segment
            self._registry.name(group, table, owned // step, kept, chain)
            # what a replay computed below its end's live blocks is wrong
            first = max(kept, table.first_block, retention.first_live_block(blocks.repair_until))
            self._registry.name(group, table, first, end, chain)
            if not self._registry.has_all(group, chain, owned // step, kept):
                return
        blocks.base = self._checkpoints.place(chain, units, kind, turns=blocks.turns, base=blocks.base)
