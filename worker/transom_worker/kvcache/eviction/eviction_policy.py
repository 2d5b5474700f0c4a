"""Decides which part of the prefix cache is evicted when memory is needed: the part that saves the least computation per byte.

    node, segment     a node of the prefix tree is a boundary at which requests continue; its segment are the hash blocks between
                      its parent's boundary and its own
    windows           the blocks that sliding-window groups need at a node's boundary
    evicting a leaf   unpins a childless node's segment and windows, and removes the node
    evicting windows  unpins the windows of a node that has children; its segment stays
    rank              a policy's score of a node; of the compared nodes, the lowest is evicted (not a tensor-parallel rank)
    return            a later request that continues from a node, or from a boundary inside its segment
    ghost             what is remembered about an evicted node, by digest, so that the policy learns from returns to it (misses)
    watch             the statistics follow a node from its placement or last return until the next return; see `return_times`
    class             nodes of the same kind, built upon or not, with equally many returns so far; they share statistics

`EvictionPolicy` is the interface, `ReturnTimePolicy` the policy in use, and `Candidates` the nodes among which it chooses. Blocks
that no node pins are evicted before any node, so this module never sees them.

Example: leaf A has 4 MiB, and a return to it saves computing 512 tokens; leaf B has 1 MiB and saves 256 tokens. If returns to both
are equally likely, A is evicted: it saves 128 tokens per MiB, B 256. If a return to A is expected three times as soon, A's rank is
three times as high, and B is evicted.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transom_worker.kvcache.eviction.policy_memory import Ghost, Ghosts
from transom_worker.kvcache.eviction.return_times import CheckpointClass, ReturnTimes, WatchedCheckpoint
from transom_worker.kvcache.prefix.tree import CheckpointKind, Node

SAMPLE_SIZE = 64  # nodes compared to find one to evict
NEAR_TOKENS = 1_024  # a request whose chain parts at most this far before a checkpoint counts as a return to it
GHOST_TOKENS = 256  # of an evicted segment, the hash blocks that end at a multiple of this many tokens become ghosts
MAX_RETURNS = 3  # nodes with more returns are in the same class as those with this many


def near_blocks(block_size: int) -> int:
    """Return `NEAR_TOKENS` in hash blocks of `block_size` tokens; at least one."""
    return max(1, NEAR_TOKENS // block_size)


class GhostHit(NamedTuple):
    """A return to an evicted node, with that node's kind and earlier returns.

    The request's chain equals the node's chain up to the boundary `parts_at`, which is `num_blocks_before` hash blocks before the
    node's own boundary. Of a long segment only some digests are remembered, so the chains may share a little more.
    """

    kind: CheckpointKind
    num_returns: int
    num_blocks_before: int
    parts_at: int


class EvictionPolicy(Protocol):
    """Learns from returns, and ranks nodes for eviction. `Checkpoints` and `NodeEviction` call it.

    One instance serves one cache; it may keep what it knows of a node in `node.policy_state`.
    """

    def admitted(self) -> None:
        """Note that a request was admitted. Policies count time in admitted requests."""

    def created(self, node: Node) -> None:
        """Note that a node was placed. The caller has set its kind and its number of returns."""

    def built_upon(self, node: Node) -> None:
        """Note that a node got its first child; or that its segment was split, because a chain parts inside it, and the node got
        its first sibling."""

    def returned(self, node: Node) -> None:
        """Note that a request returned to a node, or to a boundary inside its segment."""

    def continued(self, node: Node, upper: Node) -> None:
        """Note that a request returned to a node but shares only the first part of its segment, up to a little before its end.

        The segment was split there: the conversation continues from the node above, `upper`.
        """

    def returned_inside(self, node: Node, share: float) -> None:
        """Note that a request shares only the first part of a node's segment, the fraction `share`, and parts far before its
        end."""

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> GhostHit | None:
        """Look among a request's hash blocks `[begin, end)` for an evicted node that it returned to; return that, if one is known.

        The tree lacks these hash blocks, except perhaps the first one, at whose end a node may have lost its windows.
        """

    def windows_evicted(self, node: Node) -> None:
        """Note that a node's windows were evicted; the node may stay."""

    def removed(self, node: Node) -> None:
        """Note that a node was evicted with its segment."""

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """Return the node's rank; the smallest is evicted first.

        Evicting it frees `freed_bytes`, and a request that returns to it must then compute `lost_tokens` tokens again.
        """


class ReturnTimePolicy:
    """Ranks a node by the tokens that it is expected to save per byte and request of waiting: `worth * lost_tokens / freed_bytes`.

    `return_times` learns the *worth*, the expected returns per admitted request, by the node's class and age. A request that shares
    only a part of a segment counts as that fraction of a return, whether the node is cached or evicted. If it did not count, a long
    document with which many prompts begin would look as if nothing ever returned to it.
    """

    def __init__(self, block_size: int) -> None:
        self._times = ReturnTimes()
        self._ghosts = Ghosts()
        self._near_blocks = near_blocks(block_size)
        self._ghost_stride = max(1, GHOST_TOKENS // block_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is remembered about checkpoints, including evicted ones; at most 16 MiB."""
        return self._times.watches.num_bytes + self._ghosts.num_bytes

    def admitted(self) -> None:
        """Advance the clock by one request."""
        self._times.tick()

    def created(self, node: Node) -> None:
        """Watch the node for its first return."""
        self._watch(node, built_upon=False)

    def built_upon(self, node: Node) -> None:
        """End the node's watch, and begin one in the class of nodes that were built upon."""
        self._forget(node)
        self._watch(node, built_upon=True)

    def returned(self, node: Node) -> None:
        """Count the return, and watch the node for the next one.

        A node that was only made to split a segment was not watched before; it is from now on.
        """
        state = node.policy_state
        if state is None:
            self.created(node)
        elif isinstance(state, Watched):
            self._times.returned(state.own.number)
            self._watch(node, built_upon=self._times.class_of(state.own.class_id).was_built_upon)

    def continued(self, node: Node, upper: Node) -> None:
        """Count the return, and watch `upper` from now on. The rest of the node is not watched any more, so it is evicted first."""
        if isinstance(node.policy_state, Watched):
            self._times.returned(node.policy_state.own.number)
        node.policy_state = None
        self.built_upon(upper)

    def returned_inside(self, node: Node, share: float) -> None:
        """Count the share of a return, and end the node's watch; its rank still follows the age that the watch began with."""
        if isinstance(node.policy_state, Watched):
            self._times.returned(node.policy_state.own.number, share)

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> GhostHit | None:
        """Count a return to the evicted node that shares the most of these hash blocks, and return it; None: there is no ghost."""
        found = self._pop_last_ghost(chain, begin, end)
        if found is None:
            return None
        ghost, parts_at = found
        num_blocks_before = ghost.boundary - parts_at
        is_near = num_blocks_before <= self._near_blocks
        # The part of the segment that is shared. `Ghosts` caps the segment's length, so the quotient may exceed 1.
        share = 1.0 if is_near else max(0.0, 1.0 - num_blocks_before / ghost.num_segment_blocks)
        self._times.returned(ghost.watch, share)
        evicted = self._times.class_of(ghost.class_id)
        return GhostHit(CheckpointKind(evicted.kind), evicted.num_returns, num_blocks_before, parts_at)

    def windows_evicted(self, node: Node) -> None:
        """Remember the node as a ghost, under the digest of its last hash block."""
        if isinstance(node.policy_state, Watched):
            self._ghosts.remember(node.digest, _ghost(node.policy_state, node))

    def removed(self, node: Node) -> None:
        """Remember the node as a ghost, under the digests of its segment's last hash blocks (`NEAR_TOKENS`) and, before these, of
        those at multiples of `GHOST_TOKENS`.

        Its parent remembers the most valuable watch of an evicted descendant (`Watched.below`).
        """
        state = node.policy_state
        if not isinstance(state, Watched):
            return
        ghost = _ghost(state, node)
        near, stride = node.segment[-self._near_blocks :], self._ghost_stride
        # The index in the segment of the first hash block whose end in the chain is a multiple of the stride.
        first = -(node.boundary - len(node.segment) + 1) % stride
        for digest in (*node.segment[first : -len(near) : stride], *near):
            self._ghosts.remember(digest, ghost)
        if node.parent is not None and isinstance(node.parent.policy_state, Watched):
            above = node.parent.policy_state
            evicted = [watched for watched in (state.own, state.below, above.below) if watched is not None]
            node.parent.policy_state = above._replace(below=max(evicted, key=self._times.worth))

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """Return the worth times the lost tokens over the freed bytes; 0 for a node that is not watched.

        Two kinds of nodes are not watched: those that were only made to split a segment, and the obsolete ends of segments whose
        conversation continued from before them (`continued`).
        """
        state = node.policy_state
        if not isinstance(state, Watched):
            return 0.0
        worth = self._times.worth(state.own)
        if state.below is not None:
            worth = max(worth, self._times.worth(state.below))
        return worth * lost_tokens / max(1, freed_bytes)

    def _pop_last_ghost(self, chain: Sequence[bytes], begin: int, end: int) -> tuple[Ghost, int] | None:
        """Find the last of the hash blocks `[begin, end)` that has a ghost; remove the ghost and return it with the boundary after
        that hash block.

        To be fast, first go backwards in steps of the stride, since every evicted segment has ghosts at its multiples. Then look at
        each hash block from one stride after the hit backwards to the hit, since the last hash blocks of a segment all have ghosts.
        """
        ghosts, stride = self._ghosts, self._ghost_stride
        sampled = end - end % stride
        while sampled > begin and chain[sampled - 1] not in ghosts:
            sampled -= stride
        for boundary in range(min(end, sampled + stride - 1), max(begin, sampled - 1), -1):
            ghost = ghosts.pop(chain[boundary - 1])
            if ghost is not None:
                return ghost, boundary
        return None

    def _watch(self, node: Node, *, built_upon: bool) -> None:
        """Begin to watch a node; it forgets its evicted descendants (`Watched.below`), since it was just used itself."""
        its_class = CheckpointClass(node.kind.value, built_upon, min(node.num_returns, MAX_RETURNS))
        node.policy_state = Watched(self._times.watch(its_class))

    def _forget(self, node: Node) -> None:
        if isinstance(node.policy_state, Watched):
            self._times.forget(node.policy_state.own.number)


class Watched(NamedTuple):
    """What the policy remembers about a node: its own watch and, as `below`, that of its most valuable evicted descendant, if any.

    A client that returns to that evicted node continues from this node, so this node is worth at least as much.
    """

    own: WatchedCheckpoint
    below: WatchedCheckpoint | None = None


class Candidates:
    """The nodes that may be evicted from one tier, in a list with constant-time insertion, removal and sampling.

    `node.candidate_indices[tier]` is a node's index in the list; None: it is not in the list.
    """

    def __init__(self, tier: int) -> None:
        self._tier = tier
        self._nodes: list[Node] = []
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        """Add a node, unless it is there already."""
        if node.candidate_indices[self._tier] is None:
            node.candidate_indices[self._tier] = len(self._nodes)
            self._nodes.append(node)

    def discard(self, node: Node) -> None:
        """Remove a node, if it is there; the list's last node takes its place."""
        at = node.candidate_indices[self._tier]
        if at is not None:
            last = self._nodes.pop()
            if last is not node:
                self._nodes[at] = last
                last.candidate_indices[self._tier] = at
            node.candidate_indices[self._tier] = None

    def all(self) -> list[Node]:
        """Return all nodes. The caller must not change the list."""
        return self._nodes

    def sample(self) -> list[Node]:
        """Return all nodes if there are at most `SAMPLE_SIZE`, else this many of them drawn at random."""
        nodes = self._nodes
        if len(nodes) <= SAMPLE_SIZE:
            return nodes
        return [nodes[self._random.randrange(len(nodes))] for _ in range(SAMPLE_SIZE)]


def _ghost(watched: Watched, node: Node) -> Ghost:
    return Ghost(watched.own.number, watched.own.class_id, node.boundary, len(node.segment))
