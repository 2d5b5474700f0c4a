"""Places checkpoints, learns which of them clients return to, and gives the cheapest up when memory is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from transom_worker.kvcache.checkpoint_counts import CheckpointCounts
from transom_worker.kvcache.eviction import Candidates, EvictionPolicy
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.retention import Retention
from transom_worker.kvcache.tree import CheckpointKind, Node, PinBlocks, PrefixTree
from transom_worker.kvcache.window_repair import repair_start

NEAR_UNITS = 64  # a request that parts from a chain this close to a checkpoint has come back to it
CONVERSATION = frozenset((CheckpointKind.TURN, CheckpointKind.PROMPT, CheckpointKind.GENERATION))
SHARED = frozenset((CheckpointKind.SYSTEM, CheckpointKind.FORK))
REMEMBERED_OFFSETS = 64
LEAST_OFFSETS = 8
OFFSET_QUANTILE = 0.9


class Checkpoints:
    """The prefix tree with its policy. `present(group, digest)` tells whether the index has a block."""

    def __init__(
        self,
        layout: ArenaLayout,
        retentions: Sequence[Retention],
        policy: EvictionPolicy,
        *,
        block_size: int,
        repair: bool,
        present: Callable[[int, bytes], bool],
        pin: PinBlocks,
        unpin: PinBlocks,
    ) -> None:
        groups = range(len(layout.groups))
        self._retentions = retentions
        self._sliding = [group for group in groups if not retentions[group].keeps_everything]
        full = [(group, retentions[group].block_size // block_size) for group in groups if group not in self._sliding]
        self._block_size = block_size
        self._stride_bytes = [group.stride_bytes for group in layout.groups]
        self._unit_bytes = sum(self._stride_bytes[group] // units for group, units in full)
        self._specs = tuple(group.spec for group in layout.groups)
        self._repair = repair and bool(full)
        self._present = present
        self._policy = policy
        self.candidates = Candidates()
        self.counts = CheckpointCounts()
        self._offsets: deque[int] = deque(maxlen=REMEMBERED_OFFSETS)
        sliding = [(group, retentions[group].num_sink_blocks) for group in self._sliding]
        self.tree = PrefixTree(full, sliding, pin=pin, unpin=unpin)

    @property
    def tail_units(self) -> int:
        """How far before the end of a prompt clients part from it, for most of them: windows are kept from there on."""
        if len(self._offsets) < LEAST_OFFSETS:
            return 0
        return sorted(self._offsets)[int(OFFSET_QUANTILE * (len(self._offsets) - 1))]

    def counting_on(self, group: int, digest: bytes) -> list[tuple[Node, str]]:
        """The nodes that pin a block, each with the part of it that does: "chain" or "window". Looks at all of them."""
        found = []
        owner = self.tree.owner.get(digest)
        sliding = group in self._sliding
        if owner is not None:
            unit = owner.boundary - len(owner.units) + owner.units.index(digest)
            if not sliding or unit < self._retentions[group].num_sink_blocks:
                found.append((owner, "chain"))
        if sliding:
            at = self._sliding.index(group)
            found += [(node, "window") for node in self.tree.nodes() if node.windows and digest in node.windows[at]]
        return found

    def lock(self, chain: Sequence[bytes], hit_units: int) -> Node | None:
        """The node that a sequence builds on when it starts at a hit."""
        reach = self.tree.reach(chain, hit_units)
        if not reach:
            return None
        node = self.tree.node_at(chain, reach)
        self._add_candidates(node)
        node.locks += 1
        return node

    def arrive(self, chain: Sequence[bytes], limit: int, base: Node | None) -> int:
        """A request was admitted: learn what it came back to; returns how often its conversation has come back."""
        self._policy.admitted()
        limit = min(limit, len(chain))
        reach = self.tree.reach(chain, limit)
        ghost = self._policy.missed(chain, max(0, reach - 1), limit)
        if base is not None and base.boundary < limit and base.kind in SHARED:
            self._policy.returned(base)
        if ghost is not None:
            return self._came_back(ghost.kind, ghost.turns, ghost.offset_units)
        if not reach:
            return 0
        node, offset = self._meant(self.tree.owner[chain[reach - 1]], reach)
        if offset > NEAR_UNITS:
            return 0
        if node is not base or node.kind not in SHARED:
            self._policy.returned(node)
        return self._came_back(node.kind, node.turns, offset)

    def admitted(self, base: Node | None, hit_units: int) -> None:
        """A request goes on from a hit of so many units, at a checkpoint or between two."""
        if base is not None and base.windows is not None and base.boundary == hit_units:
            self.counts.hit(base)

    def place(
        self, chain: Sequence[bytes], boundary: int, kind: CheckpointKind, *, turns: int, base: Node | None
    ) -> Node:
        """A checkpoint at a boundary whose blocks are all in the index; the lock on `base` moves to it."""
        node, is_new = self.tree.insert(chain, boundary, kind)
        if node.windows is None:
            windows = self._windows(chain, boundary, kind)
            if windows is not None:
                node.kind = kind
                self.tree.pin_windows(node, windows)
                if node.slot >= 0:  # else it is counted when it comes among the candidates
                    self.counts.placed(node)
        if node.memo is None:
            node.turns = max(node.turns, turns)
            self._policy.created(node)
        if is_new and node.parent is not None:
            self._mark_built_upon(node, node.parent)
        self._add_candidates(node)
        node.locks += 1
        if base is not None:
            self.unlock(base)
        return node

    def unlock(self, node: Node) -> None:
        """A running sequence no longer builds on it."""
        node.locks -= 1
        self._tidy(node)

    def evict_one(self) -> bool:
        """Let go what costs least to lose; False if nothing is left to let go."""
        victim = self._cheapest(self.candidates.sample()) or self._cheapest(self.candidates.all())
        if victim is None:  # what is left are twins of blocks that running sequences computed themselves
            victim = next((node for node in self.candidates.all() if not node.children), None)
        if victim is None:
            return False
        if victim.windows is None or self._is_leaf(victim) or not self._sliding:
            self._policy.removed(victim)
            self.counts.evicted(victim)
            parent = victim.parent
            self.candidates.discard(victim)
            self.tree.drop_leaf(victim)
            if parent is not None:
                self._tidy(parent)
        else:
            self._policy.windows_dropped(victim)
            self.counts.windows_evicted(victim)
            self.tree.unpin_windows(victim)
            self._tidy(victim)
        return True

    def _mark_built_upon(self, node: Node, parent: Node) -> None:
        """A parent's first child; or the first to part from the chain that a bare parent was cut out of."""
        if parent.parent is not None and len(parent.children) == 1:
            self._policy.built_upon(parent)
        elif parent.memo is None and len(parent.children) == 2:
            for sibling in parent.children:
                if sibling is not node:
                    self._policy.built_upon(sibling)

    def _add_candidates(self, node: Node) -> None:
        """The node, and those that a cut just made around it."""
        self._add_candidate(node)
        if node.parent is not None and node.parent.parent is not None:
            self._add_candidate(node.parent)

    def _add_candidate(self, node: Node) -> None:
        if node.slot < 0 and node.windows is not None:
            self.counts.placed(node)
        self.candidates.add(node)

    def _tidy(self, node: Node) -> None:
        if self.tree.merge(node):
            self.candidates.discard(node)

    def _windows(self, chain: Sequence[bytes], boundary: int, kind: CheckpointKind) -> tuple[list[bytes], ...] | None:
        """What the sliding groups need at a boundary, by digest; None unless all of it is there."""
        tail = self.tail_units if kind is CheckpointKind.PROMPT else 0
        windows = []
        for group in self._sliding:
            retention = self._retentions[group]
            pinned = min(retention.num_sink_blocks, boundary)
            first = min(boundary, retention.first_live_block(boundary * self._block_size))
            if not all(self._present(group, digest) for digest in chain[first:boundary]):
                return None
            earlier = first
            while earlier > max(pinned, first - tail) and self._present(group, chain[earlier - 1]):
                earlier -= 1
            windows.append(list(chain[earlier:boundary]))
        return tuple(windows)

    def _came_back(self, kind: CheckpointKind, turns: int, offset: int) -> int:
        """How often a conversation has come back, given where it stood and how many units before that it parts."""
        if kind not in CONVERSATION or offset > NEAR_UNITS:
            return 0
        self._offsets.append(offset if kind is CheckpointKind.PROMPT else 0)
        return turns + 1

    def _meant(self, node: Node, reach: int) -> tuple[Node, int]:
        """The checkpoint that a request meant which shares `reach` units with the tree, and how far before it it parted."""
        if node.memo is None and node.children:  # only cut out of a longer segment
            node = min(node.children, key=lambda child: child.boundary)
        return node, node.boundary - reach

    def _is_leaf(self, node: Node) -> bool:
        return not node.children and not node.locks

    def _cheapest(self, nodes: Sequence[Node]) -> Node | None:
        best, least = None, 0.0
        for node in nodes:
            if self._is_leaf(node):
                rank = self._policy.rank(node, *self._leaf_cost(node))
            elif node.windows:
                rank = self._policy.rank(node, *self._windows_cost(node))
            else:
                continue
            if best is None or rank < least:
                best, least = node, rank
        return best

    def _leaf_cost(self, node: Node) -> tuple[int, int]:
        """Tokens lost and bytes freed if a leaf goes."""
        lost = (node.boundary - node.checkpoint_below().boundary) * self._block_size
        if node.windows is None:
            lost = max(0, lost - self._repair_tokens(node.boundary))
        return lost, len(node.units) * self._unit_bytes + self._window_bytes(node)

    def _windows_cost(self, node: Node) -> tuple[int, int]:
        """Tokens lost and bytes freed if the windows of a node go and its segment stays."""
        lost = (node.boundary - node.checkpoint_below().boundary) * self._block_size
        if self._repair:
            lost = min(lost, self._repair_tokens(node.boundary))
        return lost, self._window_bytes(node)

    def _window_bytes(self, node: Node) -> int:
        """Bytes that a node's windows add to those of the checkpoint below: what overlaps is charged once."""
        if node.windows is None:
            return 0
        below = node.checkpoint_below().boundary
        return sum(
            min(len(digests), node.boundary - below) * self._stride_bytes[group]
            for group, digests in zip(self._sliding, node.windows, strict=True)
        )

    def _repair_tokens(self, boundary: int) -> int:
        n = boundary * self._block_size
        return n - repair_start(self._specs, n) if self._repair else n
