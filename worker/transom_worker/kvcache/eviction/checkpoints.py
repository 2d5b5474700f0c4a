"""`Checkpoints`: places checkpoints in the prefix tree, learns which ones clients return to, and evicts the least valuable ones.

    node        a boundary of the prefix tree; it pins its *segment* (the hash blocks since its parent) and its *windows* (the
                blocks that sliding groups need there); a checkpoint is a node with its windows
    return      a request that continues from a checkpoint, or parts from its chain at most `eviction_policy.NEAR_TOKENS` before it
    offset      how many hash blocks before a checkpoint a returning request parts from its chain
    tail        the last hash blocks of a prompt, at whose boundaries windows are kept too
    base node   the node that a running sequence locks: the one that it started from or placed last

The calls for one sequence, each with what it needs from the one before:

    base = lock(chain, hit)                    # admission: the hit's node is not evicted while the sequence runs
    returns = learn_return(chain, limit, base) # what does the request continue?
    base = place(chain, boundary, ..., base)   # at each boundary where a checkpoint is planned
    unlock(base)                               # release

Example of a return with a tail. A checkpoint stands at the end of a prompt of 100 hash blocks. The client's next request repeats
only the first 98 of them, because its chat template renders the end of a turn differently when an answer follows. The cache learns
the offset, 2 hash blocks. At the ends of later prompts it also keeps the windows of the two boundaries before the end, so that such
a request continues at hash block 98 without a window repair (computing cached tokens again for sliding groups). Boundary 98 becomes
a node, from which the conversation continues; the other 2 hash blocks are the first to be evicted.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from transom_core.kv_cache.retention_set import RetentionSet
from transom_core.kv_cache.tiers import DEVICE
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.eviction.eviction_policy import EvictionPolicy, GhostHit, near_blocks
from transom_worker.kvcache.eviction.node_eviction import EvictionCosts, NodeEviction
from transom_worker.kvcache.prefix.tree import CheckpointKind, Node, PrefixTree
from transom_worker.kvcache.stats import CheckpointStats
from transom_worker.kvcache.tiers.disk.index import DiskStores
from transom_worker.kvcache.tiers.tier_moves import TierMoves

# Checkpoints of one conversation, and checkpoints that several conversations share.
CONVERSATION_KINDS = frozenset((CheckpointKind.TURN, CheckpointKind.PROMPT, CheckpointKind.GENERATION))
SHARED_KINDS = frozenset((CheckpointKind.SYSTEM, CheckpointKind.FORK))
REMEMBERED_OFFSETS = 64  # recent returns from which the tail is learned
MIN_OFFSETS = 8  # the tail is empty until this many returns were seen
OFFSET_QUANTILE = 0.9  # the tail is long enough for this fraction of the returns


class Continuation(NamedTuple):
    """What a new request continues.

    `num_returns` is how many returns its conversation has had. `parts_at` is the boundary at which its chain parts from that of an
    evicted node, if that is far before the node's own boundary; else None.
    """

    num_returns: int = 0
    parts_at: int | None = None


class Checkpoints:
    """The prefix tree with its eviction policy.

    `registry` has the device's blocks; `repair` says whether window repairs are allowed. `moves` brings evicted nodes to the host
    tier, and `stores` to the disk tier.
    """

    def __init__(
        self,
        registry: BlockRegistry,
        tree: PrefixTree,
        moves: TierMoves,
        stores: DiskStores,
        policy: EvictionPolicy,
        *,
        repair: bool,
    ) -> None:
        self._block_size = registry.block_size
        self._near_blocks = near_blocks(registry.block_size)
        self._present = registry.has
        self._policy = policy
        self.counts = CheckpointStats()
        self._return_offsets: deque[int] = deque(maxlen=REMEMBERED_OFFSETS)
        self.tree = tree
        self._moves = moves
        strides = [group.stride_bytes for group in registry.layout.groups]
        costs = EvictionCosts(strides, block_size=registry.block_size, repair=repair)
        self.eviction = NodeEviction(tree, moves, stores, policy, costs, self.counts)

    @property
    def tail_blocks(self) -> int:
        """Length of the tail in hash blocks: most returning requests part from a prompt at most this far before its end.

        It is the `OFFSET_QUANTILE` of the remembered offsets.
        """
        if len(self._return_offsets) < MIN_OFFSETS:
            return 0
        return sorted(self._return_offsets)[int(OFFSET_QUANTILE * (len(self._return_offsets) - 1))]

    def pinning_nodes(self, group: int, digest: bytes) -> list[tuple[Node, str]]:
        """Return the nodes that pin a block, each with the part that pins it: "chain" (its segment) or "window".

        Searches all nodes.
        """
        found = []
        owner = self.tree.owner.get(digest)
        if owner is not None:
            index = owner.boundary - len(owner.segment) + owner.segment.index(digest)
            num_sink_blocks = dict(owner.retentions.sliding_groups).get(group)
            if num_sink_blocks is None or index < num_sink_blocks:
                found.append((owner, "chain"))
        for node in self.tree.nodes():
            found += [(node, "window") for at, digests in node.window_blocks() if at == group and digest in digests]
        return found

    def lock(self, chain: Sequence[bytes], num_hash_blocks: int) -> Node | None:
        """Lock and return the deepest node of a chain within its first `num_hash_blocks` hash blocks (a hit); None if the tree has
        none of these.

        If they end inside a segment, the segment is split there.
        """
        reach = self.tree.reach(chain, num_hash_blocks)
        if not reach:
            return None
        node = self.tree.node_at(chain, reach)
        self.tree.lock(node)
        self._add_candidates(node)
        self.promote(node)
        return node

    def promote(self, node: Node) -> None:
        """Let a node in the host tier and its ancestors pin blocks on the device instead, as far as the device has all their
        blocks."""
        for changed in self._moves.promote(node):
            self.eviction.add(changed)
            self.eviction.tidy(changed)

    def learn_return(self, chain: Sequence[bytes], limit: int, base_node: Node | None) -> Continuation:
        """Learn which checkpoint a newly admitted request returns to, and return what it continues.

        `limit` is the last boundary that the request may reuse, `base_node` the node that it locks. Example: the third request of a
        conversation returns to the end of the second: 2 returns. The cases, in the order of the code:

        - The request parts from a cached checkpoint of its conversation a little before the checkpoint's end.
        - It continues from a checkpoint that several conversations share; besides, one of the following may hold.
        - It returns to an evicted node (a ghost).
        - It parts far before the end of a cached segment: a fraction of a return.
        - It returns to a cached checkpoint.
        """
        self._policy.admitted()
        limit = min(limit, len(chain))
        reach = self.tree.reach(chain, limit)
        ghost = self._policy.missed(chain, max(0, reach - 1), limit)
        near = self._nearly_returned_to(chain, reach) if reach and ghost is None else None
        if near is not None:
            return self._continue_before_end(near, chain, reach)
        if base_node is not None and base_node.boundary < limit and base_node.kind in SHARED_KINDS:
            base_node.num_returns += 1
            self._policy.returned(base_node)
        if ghost is not None:
            return self._continue_evicted(ghost)
        if not reach:
            return Continuation()
        owner = self.tree.owner[chain[reach - 1]]
        node, offset = self._returned_to(owner, reach)
        if offset > self._near_blocks:
            begin = owner.boundary - len(owner.segment)  # of the segment that `lock` may just have split
            self._policy.returned_inside(node, (reach - begin) / (node.boundary - begin))
            return Continuation()
        if node is not base_node or node.kind not in SHARED_KINDS:
            self._policy.returned(node)
        return Continuation(self._count_return(node.kind, node.num_returns, offset))

    def count_hit(self, base_node: Node | None, num_hash_blocks: int) -> None:
        """Count a hit of `num_hash_blocks` hash blocks for its checkpoint's kind, if it ends exactly at a checkpoint."""
        if base_node is not None and base_node.windows is not None and base_node.boundary == num_hash_blocks:
            self.counts.hit[base_node.kind.value] += 1

    def place(
        self,
        chain: Sequence[bytes],
        boundary: int,
        kind: CheckpointKind,
        *,
        retentions: RetentionSet,
        num_returns: int,
        base_node: Node | None,
    ) -> Node:
        """Place a checkpoint at a boundary, lock its node instead of `base_node`, and return the node.

        The prefix index must have the blocks of the full groups up to the boundary. If it lacks some blocks of the windows, the
        node pins only its segment and is not a checkpoint.
        """
        self._promote_chain(chain, boundary)
        node, is_new = self.tree.insert(chain, boundary, kind, retentions)
        if node.windows is None:
            windows = self._windows(chain, boundary, kind, retentions)
            if windows is not None:
                node.kind = kind
                self.tree.pin_windows(node, windows)
                if node.candidate_indices[DEVICE] is not None:  # else `NodeEviction.add` counts it
                    self.counts.placed[node.kind.value] += 1
        if node.policy_state is None:
            # A FORK has had a return already: that of the chain that parts there.
            node.num_returns = max(node.num_returns, num_returns, kind is CheckpointKind.FORK)
            self._policy.created(node)
        if is_new and node.parent is not None:
            self._mark_built_upon(node, node.parent)
        self.tree.lock(node)
        self._add_candidates(node)
        if base_node is not None:
            self.unlock(base_node)
        return node

    def _promote_chain(self, chain: Sequence[bytes], boundary: int) -> None:
        """Promote the nodes of a chain up to a boundary."""
        reach = self.tree.reach(chain, boundary)
        if reach and self._moves.host.exists:
            node = self.tree.node_at(chain, reach)
            self._add_candidates(node)
            self.promote(node)

    def unlock(self, node: Node) -> None:
        """Remove one lock from a node."""
        self.tree.unlock(node)
        self.eviction.tidy(node)

    def _mark_built_upon(self, node: Node, parent: Node) -> None:
        """Tell the policy if a new node is the first child of `parent`, or the first sibling of a node whose segment was split."""
        if parent.parent is not None and len(parent.children) == 1:
            self._policy.built_upon(parent)
        elif parent.policy_state is None and len(parent.children) == 2:
            for sibling in parent.children:
                if sibling is not node:
                    self._policy.built_upon(sibling)

    def _add_candidates(self, node: Node) -> None:
        """Add a node to the nodes that may be evicted, and its parent, which a split may just have made."""
        self.eviction.add(node)
        if node.parent is not None and node.parent.parent is not None:
            self.eviction.add(node.parent)

    def _windows(
        self, chain: Sequence[bytes], boundary: int, kind: CheckpointKind, retentions: RetentionSet
    ) -> tuple[list[bytes], ...] | None:
        """Return, for each sliding group, the digests of the blocks that it needs at a boundary; None if one of them is not cached.

        At a prompt's end (kind PROMPT) the result also has the earlier blocks that the boundaries of the tail need, back to the
        first one that is not cached. The tail does not reach into the sink blocks, which segments pin.
        """
        tail = self.tail_blocks if kind is CheckpointKind.PROMPT else 0
        windows = []
        for group, num_sink_blocks in retentions.sliding_groups:
            retention = retentions[group]
            first = min(boundary, retention.first_live_block(boundary * self._block_size))
            if not all(self._present(group, digest) for digest in chain[first:boundary]):
                return None
            earlier = first
            while earlier > max(min(num_sink_blocks, boundary), first - tail) and self._present(
                group, chain[earlier - 1]
            ):
                earlier -= 1
            windows.append(list(chain[earlier:boundary]))
        return tuple(windows)

    def _continue_evicted(self, ghost: GhostHit) -> Continuation:
        """Return what a request continues that returned to an evicted node, or that parts from that node's chain.

        For a FORK, which several conversations share, the number of returns is that node's.
        """
        if ghost.kind is CheckpointKind.FORK:
            num_returns = ghost.num_returns
        else:
            num_returns = self._count_return(ghost.kind, ghost.num_returns, ghost.num_blocks_before)
        is_far = ghost.num_blocks_before > self._near_blocks
        return Continuation(num_returns, ghost.parts_at if is_far else None)

    def _nearly_returned_to(self, chain: Sequence[bytes], reach: int) -> Node | None:
        """Return the checkpoint of a conversation from whose chain a request parts a little before the end; None if there is none.

        The request shares `reach` hash blocks with the tree.
        """
        node, offset = self._returned_to(self.tree.owner[chain[reach - 1]], reach)
        return node if 0 < offset <= self._near_blocks and node.kind in CONVERSATION_KINDS else None

    def _continue_before_end(self, node: Node, chain: Sequence[bytes], reach: int) -> Continuation:
        """Learn that a request returns to a checkpoint but parts from it a little before its end, and return what it continues.

        The boundary where they part becomes a node, from which the conversation continues. The rest of the checkpoint is obsolete,
        because the client's template rendered that text again.
        """
        upper = self.tree.node_at(chain, reach)
        self._add_candidates(upper)
        num_returns = self._count_return(node.kind, node.num_returns, node.boundary - reach)
        upper.num_returns = node.num_returns
        self._policy.continued(node, upper)
        return Continuation(num_returns)

    def _count_return(self, kind: CheckpointKind, num_returns: int, offset: int) -> int:
        """Return how many returns a conversation has had, this one included, and remember the offset; 0 if this is not a return.

        `kind` and `num_returns` are those of the checkpoint. Only PROMPT checkpoints have a tail, so a return to another kind is
        remembered with offset 0.
        """
        if kind not in CONVERSATION_KINDS or offset > self._near_blocks:
            return 0
        self._return_offsets.append(offset if kind is CheckpointKind.PROMPT else 0)
        return num_returns + 1

    def _returned_to(self, node: Node, reach: int) -> tuple[Node, int]:
        """Return the checkpoint that a request returns to, and how many hash blocks before it the request's chain parts.

        The request shares `reach` hash blocks with the tree; `node` owns the last of them.
        """
        # If the node was only split off a longer segment, the checkpoint is the nearest of its children.
        if node.policy_state is None and node.children:
            node = min(node.children, key=lambda child: child.boundary)
        return node, node.boundary - reach
