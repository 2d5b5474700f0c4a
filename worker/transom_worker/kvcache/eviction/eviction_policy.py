"""Decides which part of the prefix cache is evicted when memory is needed: the part that saves the least computation per byte.

    evicting a leaf   unpins a childless node's segment and windows, and removes the node
    evicting windows  unpins the windows of a node that has children; its segment stays
    rank              a policy's score of a node; of the compared nodes, the lowest is evicted (not a tensor-parallel rank)
    return            a later request that continues from a node, or from a boundary inside its segment
    ghost             what is remembered about an evicted node, by digest, so that the policy learns from returns to it (misses)

Blocks that no node pins are evicted before any node, so this module never sees them.

Example: leaf A has 4 MiB, and a return to it saves computing 512 tokens; leaf B has 1 MiB and saves 256 tokens. If returns to both
are equally likely, A is evicted: it saves 128 tokens per MiB, B 256. If a return to A is expected three times as soon, A's rank is
three times as high, and B is evicted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transom_worker.kvcache.eviction.ghosts import Ghost, Ghosts
from transom_worker.kvcache.eviction.return_times import CheckpointClass, ReturnTimes, WatchedCheckpoint
from transom_worker.kvcache.prefix.tree import CheckpointKind, Node

SAMPLE_SIZE = 64  # nodes compared to find one to evict
NEAR_TOKENS = 1_024  # a request whose chain parts at most this far before a checkpoint counts as a return to it
GHOST_TOKENS = 256  # every hash block of an evicted segment at a multiple of this in its chain becomes a ghost
MAX_RETURNS = 3  # classes treat higher numbers of returns alike


def near_blocks(block_size: int) -> int:
    """Return `NEAR_TOKENS` in hash blocks of `block_size` tokens; at least one."""
    return max(1, NEAR_TOKENS // block_size)


class GhostHit(NamedTuple):
    """A return to an evicted node, with that node's kind and earlier returns.

    The request's chain shares the node's chain up to the boundary `parts_at`, which is `num_blocks_before` hash blocks before the
    node's own boundary. Of long segments only samples are remembered, so the chains may share a little more.
    """

    kind: CheckpointKind
    num_returns: int
    num_blocks_before: int
    parts_at: int


class EvictionPolicy(Protocol):
    """Learns from returns, and ranks nodes for eviction.

    One instance serves one cache; it may keep what it knows of a node in `node.policy_state`.
    """

    def admitted(self) -> None:
        """Note that a request was admitted. Policies count time in admitted requests."""

    def created(self, node: Node) -> None:
        """Note that a node was placed. Its kind and its number of returns are set."""

    def built_upon(self, node: Node) -> None:
        """Note that a node got its first child, or its first sibling, whose chain parts inside the segment that both shared."""

    def returned(self, node: Node) -> None:
        """Note that a request returned to a node, or to a boundary inside its segment."""

    def continued(self, node: Node, upper: Node) -> None:
        """Note that a request returned to a node and shares all of its segment but the end; `upper` is the node above, where the
        shared part ends. The conversation continues there.
        """

    def returned_inside(self, node: Node, share: float) -> None:
        """Note that a request shares only the first part of a node's segment, this fraction of it, and parts far before its end."""

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> GhostHit | None:
        """Note that a request's hash blocks `[begin, end)` are not in the tree; return the evicted node that it returned to, if one
        is known.
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

    `return_times` learns the worth: expected returns per admitted request, by the node's class and age. A request that shares only
    a part of a segment counts as that fraction of a return, whether the node is cached or evicted. Otherwise a long document with
    which many prompts begin would look as if nothing ever returned to it.
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
        """Watch the node from now on as one of the class of nodes that were built upon."""
        self._forget(node)
        self._watch(node, built_upon=True)

    def returned(self, node: Node) -> None:
        """Count the return, and watch the node for the next one. A node that was only made to split a segment is watched from now
        on."""
        state = node.policy_state
        if state is None:
            self.created(node)
        elif isinstance(state, Watched):
            self._times.returned(state.own.number)
            self._watch(node, built_upon=self._times.class_of(state.own.class_id).was_built_upon)

    def continued(self, node: Node, upper: Node) -> None:
        """Count the return, and watch `upper` from now on. What is left of the node is not watched, so it is evicted first."""
        if isinstance(node.policy_state, Watched):
            self._times.returned(node.policy_state.own.number)
        node.policy_state = None
        self.built_upon(upper)

    def returned_inside(self, node: Node, share: float) -> None:
        """Count the share of a return, and end the node's watch; the node keeps its age."""
        if isinstance(node.policy_state, Watched):
            self._times.returned(node.policy_state.own.number, share)

    def missed(self, chain: Sequence[bytes], begin: int, end: int) -> GhostHit | None:
        """Count a return to the evicted node that shares most of the chain, and describe it; None if no ghost shares any of it."""
        found = self._pop_last_ghost(chain, begin, end)
        if found is None:
            return None
        ghost, parts_at = found
        num_blocks_before = ghost.boundary - parts_at
        is_near = num_blocks_before <= self._near_blocks
        share = 1.0 if is_near else max(0.0, 1.0 - num_blocks_before / ghost.num_segment_blocks)
        self._times.returned(ghost.watch, share)
        evicted = self._times.class_of(ghost.class_id)
        return GhostHit(CheckpointKind(evicted.kind), evicted.num_returns, num_blocks_before, parts_at)

    def windows_evicted(self, node: Node) -> None:
        """Remember the node as a ghost, under the digest of its last hash block."""
        if isinstance(node.policy_state, Watched):
            self._ghosts.remember(node.digest, _ghost(node.policy_state, node))

    def removed(self, node: Node) -> None:
        """Remember the node as a ghost, under the digests of the segment's last hash blocks and of some of the others."""
        state = node.policy_state
        if not isinstance(state, Watched):
            return
        ghost = _ghost(state, node)
        near, stride = node.segment[-self._near_blocks :], self._ghost_stride
        # of the segment's hash blocks, the first whose end in the chain is at a multiple of the stride
        first = -(node.boundary - len(node.segment) + 1) % stride
        for digest in (*node.segment[first : -len(near) : stride], *near):
            self._ghosts.remember(digest, ghost)
        if node.parent is not None and isinstance(node.parent.policy_state, Watched):
            above = node.parent.policy_state
            evicted = [watched for watched in (state.own, state.below, above.below) if watched is not None]
            node.parent.policy_state = above._replace(below=max(evicted, key=self._times.worth))

    def rank(self, node: Node, lost_tokens: int, freed_bytes: int) -> float:
        """Return the worth times the lost tokens over the freed bytes; 0 for a node that is not watched.

        Not watched are nodes that were only made to split a segment, and ends of segments that their conversation did not continue
        (`continued`).
        """
        state = node.policy_state
        if not isinstance(state, Watched):
            return 0.0
        worth = self._times.worth(state.own)
        if state.below is not None:
            worth = max(worth, self._times.worth(state.below))
        return worth * lost_tokens / max(1, freed_bytes)

    def _pop_last_ghost(self, chain: Sequence[bytes], begin: int, end: int) -> tuple[Ghost, int] | None:
        """Find the last of the hash blocks `[begin, end)` that has a ghost; return that ghost with the boundary, and forget it.

        Where a long segment was evicted, hash blocks at multiples of the stride have ghosts, so only these are looked at first.
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
        """Begin to watch a node, and forget the evicted nodes below it, since the node has just been used."""
        its_class = CheckpointClass(node.kind.value, built_upon, min(node.num_returns, MAX_RETURNS))
        node.policy_state = Watched(self._times.watch(its_class))

    def _forget(self, node: Node) -> None:
        if isinstance(node.policy_state, Watched):
            self._times.forget(node.policy_state.own.number)


class Watched(NamedTuple):
    """What the policy remembers about a node: its watch, and the watch of the most valuable evicted node below it, if any.

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
