"""Computes how many prompt tokens other caches would hit for a workload, as bounds to compare the real cache with.

    infinite                a cache that never evicts
    full_alone_lru          equal memory, which holds only the KV of full-attention layers and evicts the least recently used first
    full_alone_clairvoyant  equal memory, which holds only the KV of full-attention layers, with the clairvoyant policy
    clairvoyant             equal memory, which holds the KV of all layers, sliding windows included, with the clairvoyant policy

Terms:

    clairvoyant  an eviction policy that knows all requests to come (offline, as Belady's rule)
    run          consecutive tokens that requests share as a whole, such as one message of a chat; a *node* is a run after a prefix
    path         the nodes of one request's prompt and answer, in order. Example: two requests with the messages A, B and A, C have
                 paths of two nodes, and share node A
    kept         held by the simulated cache; it holds the first `node.kept` tokens of each node
    checkpoint   the window blocks that the sliding groups (groups of window layers) need at the position where a request continues
    index        a request's index in the workload; it also serves as the time

The clairvoyant policy keeps a node only for the next request that reads it. When memory is short, it chooses the future request
with the highest *cost*, and evicts what is kept for that request from the end of its prefix:

    cost = bytes kept for the request / tokens kept for it * requests until it arrives

The cost is high if a hit token takes many bytes, and takes them for long. Without windows every token takes the same bytes, so this
is Belady's rule: evict what is used furthest in the future. With windows each future request also needs one checkpoint. Example:
100 tokens are kept for one request and 1,000 for another, both 10 requests ahead; a token takes 1 KiB and a checkpoint 100 KiB. The
costs are (100 + 100) / 100 * 10 = 20 and (1,000 + 100) / 1,000 * 10 = 11, so the short prefix is evicted first.

Requests are served one at a time, and hits are cut to whole hash blocks. The clairvoyant figures are approximations. They may be
too high, because they assume pages without waste, no steps in flight, and checkpoints wherever they are needed. They may be too
low, because evicting the highest cost first is not always the best choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transom_core.kv_cache.layout import ArenaLayout
from transom_core.kv_cache.retention import Retention
from transom_worker.simulate.workload import SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The memory of a cache, and the bytes that a kept token and a checkpoint take.

    Example: `token_bytes` of 24 KiB and checkpoints of 3 MiB; a kept prefix of 1,000 tokens with its checkpoint takes 27 MiB.
    """

    block_tokens: int  # tokens of a hash block
    pool_bytes: int
    token_bytes: int  # of a token in the full groups, which keep every token; 0 if there are none
    # For each sliding group: which blocks it keeps, and the bytes of a block.
    sliding: tuple[tuple[Retention, int], ...] = ()

    @classmethod
    def of(cls, layout: ArenaLayout, *, block_size: int) -> Footprint:
        """Return the footprint of a KV cache layout."""
        everything = [group for group in layout.groups if group.spec.keeps_everything]
        sliding = [group for group in layout.groups if not group.spec.keeps_everything]
        return cls(
            block_tokens=block_size,
            pool_bytes=layout.pool_bytes,
            token_bytes=sum(group.stride_bytes // group.spec.block_size for group in everything),
            sliding=tuple((Retention(group.spec), group.stride_bytes) for group in sliding),
        )

    def full_alone(self) -> Footprint:
        """Return this footprint without windows."""
        return Footprint(block_tokens=self.block_tokens, pool_bytes=self.pool_bytes, token_bytes=self.token_bytes)

    def checkpoint_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a checkpoint after `num_tokens` tokens."""
        total = 0
        for retention, block_bytes in self.sliding:
            num_blocks = -(-num_tokens // retention.block_size)
            run = num_blocks - min(num_blocks, retention.first_live_block(num_tokens))
            total += (run + min(retention.num_sink_blocks, num_blocks)) * block_bytes
        return total

    def hit_tokens(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Return how many of a prefix's tokens are hit: whole hash blocks that leave at least one prompt token to compute."""
        return min(num_tokens, num_prompt_tokens - 1) // self.block_tokens * self.block_tokens


def hit_bounds(requests: Sequence[SimulatedRequest], footprint: Footprint) -> dict[str, int]:
    """Return the hit tokens of all requests by bound; the module's docstring lists the bounds."""
    full_alone = footprint.full_alone()
    infinite = _hits_without_eviction(content_paths(requests), footprint)
    return {
        "infinite": sum(infinite),
        "full_alone_lru": _least_recently_used_hits(content_paths(requests), full_alone),
        "full_alone_clairvoyant": Clairvoyant(content_paths(requests), full_alone, infinite).run(),
        "clairvoyant": Clairvoyant(content_paths(requests), footprint, infinite).run(),
    }


def _hits_without_eviction(paths: Sequence[ContentPath], footprint: Footprint) -> list[int]:
    """Return the hit tokens of each request if nothing is evicted."""
    hits = []
    for path in paths:
        hits.append(footprint.hit_tokens(path.kept_prefix(), path.num_prompt_tokens))
        for node, num_tokens in path.steps:
            node.kept = max(node.kept, num_tokens)
    return hits


def _least_recently_used_hits(paths: Sequence[ContentPath], footprint: Footprint) -> int:
    """Return the hit tokens of all requests if the least recently used nodes are evicted first."""
    capacity_tokens = footprint.pool_bytes // max(1, footprint.token_bytes)
    by_age: OrderedDict[Node, None] = OrderedDict()
    num_kept = num_hit = 0
    for path in paths:
        num_hit += footprint.hit_tokens(path.kept_prefix(), path.num_prompt_tokens)
        for node, num_tokens in reversed(path.steps):  # the end of a path is to be evicted before its beginning
            num_kept += max(0, num_tokens - node.kept)
            node.kept = max(node.kept, num_tokens)
            by_age[node] = None
            by_age.move_to_end(node)
        while num_kept > capacity_tokens:
            node = next(iter(by_age))
            dropped = min(node.kept, num_kept - capacity_tokens)
            node.kept -= dropped
            num_kept -= dropped
            if not node.kept:
                del by_age[node]
    return num_hit


class _KeptForRequest:
    """What is kept for one future request: nodes of its path, the deepest last, and the checkpoint at which it continues."""

    __slots__ = ("checkpoint_bytes", "nodes", "num_tokens")

    def __init__(self, checkpoint_bytes: int) -> None:
        self.checkpoint_bytes = checkpoint_bytes
        self.nodes: list[Node] = []
        self.num_tokens = 0

    def add(self, node: Node) -> None:
        """Keep a node for this request."""
        self.nodes.append(node)
        self.nodes.sort(key=_depth)
        self.num_tokens += node.kept

    def evict(self, num_tokens: int) -> int:
        """Evict at most `num_tokens` tokens from the end of the deepest node, and return how many were evicted."""
        node = self.nodes[-1]
        dropped = min(node.kept, num_tokens)
        node.kept -= dropped
        self.num_tokens -= dropped
        if not node.kept:
            self.nodes.pop()
        return dropped


class Clairvoyant:
    """A cache with the clairvoyant policy, which the module's docstring describes.

    `infinite_hits` has each request's hit tokens if nothing is evicted: the position at which it continues, and so needs a
    checkpoint.
    """

    def __init__(self, paths: Sequence[ContentPath], footprint: Footprint, infinite_hits: Sequence[int]) -> None:
        self._paths = paths
        self._footprint = footprint
        self._infinite_hits = infinite_hits
        self._kept_for: dict[int, _KeptForRequest] = {}  # index of a future request -> what is kept for it
        self._kept_bytes = 0

    def run(self) -> int:
        """Serve all requests; return their hit tokens."""
        return sum(self._serve(index, path) for index, path in enumerate(self._paths))

    def _serve(self, index: int, path: ContentPath) -> int:
        """Serve the request at this index, keep what later ones read, and return its hit tokens."""
        hit = self._footprint.hit_tokens(path.kept_prefix(), path.num_prompt_tokens)
        # All that is kept of this request's path is kept for this request, because it is each node's next reader.
        kept = self._kept_for.pop(index, None)
        if kept is not None:
            self._kept_bytes -= self._bytes(kept)
        # While the request runs, its own blocks take memory.
        used = path.num_tokens * self._footprint.token_bytes + self._footprint.checkpoint_bytes(path.num_tokens)
        self._evict_down_to(self._footprint.pool_bytes - used, now=index)
        # Then each of its nodes is kept for the next request that reads it.
        for node, num_tokens in path.steps:
            next_index = node.next_reader(index)
            node.kept = 0 if next_index is None else max(node.kept, num_tokens)
            if next_index is not None:
                self._keep_for(next_index, node)
        return hit

    def _keep_for(self, index: int, node: Node) -> None:
        """Keep a node for the request at this index."""
        kept = self._kept_for.get(index)
        if kept is None:
            kept = _KeptForRequest(self._footprint.checkpoint_bytes(self._infinite_hits[index]))
            self._kept_for[index] = kept
            self._kept_bytes += kept.checkpoint_bytes
        kept.add(node)
        self._kept_bytes += node.kept * self._footprint.token_bytes

    def _evict_down_to(self, capacity_bytes: int, *, now: int) -> None:
        """Evict from what is kept for the request with the highest cost, until the kept bytes fit."""
        token_bytes = self._footprint.token_bytes
        while self._kept_bytes > capacity_bytes and self._kept_for:
            index, kept = max(self._kept_for.items(), key=lambda item: self._cost(now, *item))
            excess_tokens = -(-(self._kept_bytes - capacity_bytes) // max(1, token_bytes))
            self._kept_bytes -= kept.evict(excess_tokens) * token_bytes
            if not kept.nodes:
                self._kept_bytes -= kept.checkpoint_bytes
                del self._kept_for[index]

    def _cost(self, now: int, index: int, kept: _KeptForRequest) -> float:
        """Return the cost of what is kept for the request at this index: bytes per token times the requests until it arrives."""
        return self._bytes(kept) / kept.num_tokens * (index - now)

    def _bytes(self, kept: _KeptForRequest) -> int:
        """Return the bytes of the tokens and the checkpoint that are kept for a request."""
        return kept.num_tokens * self._footprint.token_bytes + kept.checkpoint_bytes


def _depth(node: Node) -> int:
    return node.depth


class Node:
    """A run of tokens after a given prefix. Its first `kept` tokens are in the simulated cache."""

    __slots__ = ("depth", "kept", "readers")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # number of runs before this one
        self.kept = 0
        self.readers: list[int] = []  # indices of the requests that have this node on their paths, ascending

    def next_reader(self, index: int) -> int | None:
        """Return the index of the next request after request `index` that reads the node; None if there is none."""
        at = bisect_right(self.readers, index)
        return self.readers[at] if at < len(self.readers) else None


class PathStep(NamedTuple):
    """One node of a request's path, and how many of the node's tokens the request has, since it may have only the first ones."""

    node: Node
    num_tokens: int


class ContentPath(NamedTuple):
    """One request's nodes in the order of their tokens, prompt and answer; `num_tokens` of the tokens get keys and values."""

    steps: tuple[PathStep, ...]
    num_prompt_tokens: int
    num_tokens: int

    def kept_prefix(self) -> int:
        """Return how many leading prompt tokens are kept in the simulated cache."""
        num_tokens = 0
        for node, num_read in self.steps:
            num_tokens += min(node.kept, num_read)
            if node.kept < num_read:
                break
        return min(num_tokens, self.num_prompt_tokens)


def content_paths(requests: Sequence[SimulatedRequest]) -> list[ContentPath]:
    """Return one path per request, in the order of the requests; equal prefixes share nodes."""
    nodes: dict[tuple[Node | None, int], Node] = {}
    paths = []
    for index, request in enumerate(requests):
        steps = tuple(_path_steps(nodes, request, index))
        num_tokens = request.num_prompt_tokens + request.answer.num_tokens - 1  # the last token is only sampled
        paths.append(ContentPath(steps, request.num_prompt_tokens, num_tokens))
    return paths


def _path_steps(
    nodes: dict[tuple[Node | None, int], Node], request: SimulatedRequest, index: int
) -> Iterator[PathStep]:
    """Yield the steps of one request's path, and add new nodes to `nodes`: (parent, first token of the run) -> node."""
    parent: Node | None = None
    answer = request.answer.cut(request.answer.num_tokens - 1)
    for depth, (first_token, num_tokens) in enumerate((*request.prompt, answer)):
        if not num_tokens:
            continue
        node = nodes.get((parent, first_token))
        if node is None:
            node = nodes[parent, first_token] = Node(depth)
        node.readers.append(index)
        yield PathStep(node, num_tokens)
        parent = node
