"""Computes upper bounds of prefix-cache hits, one request at a time: what other caches of the same bytes could hit.

    infinite                nothing is ever evicted
    full_alone_lru          the pool holds the blocks of full-attention groups alone; least recently used is evicted first
    full_alone_clairvoyant  the same pool, with a policy that knows all requests to come
    clairvoyant             windows count too, with a policy that knows all requests to come

The clairvoyant policy keeps contents only for the next request that reads them. When memory is short it evicts, token by token from
the far end, what costs most per token that it saves: bytes, times how long they must still be kept. Without windows every token
costs the same, and this is Belady's rule: what is used furthest in the future is evicted first. With windows each request to come
is charged one checkpoint, the window blocks that are live where it will return. Example: a prefix of 100 tokens needed in 10
requests and one of 1,000 tokens needed in 10 requests are charged the same checkpoint, so the short one costs more per token and is
evicted first. It is an approximation: too high in that nothing else takes memory (pages without waste, no steps in flight) and that
checkpoints are always where they are needed; too low in that greedy choices are not the best ones where blocks differ in worth. A
run of tokens (a message, or what one hash id stands for) is the grain of sharing; hits are cut to whole hash blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.kvcache.retention import Retention
from transom_worker.simulate.content_tree import ContentPath, Node, content_paths
from transom_worker.simulate.workload import SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that a cache needs: per token of a kept prefix, and per checkpoint for the windows."""

    block_tokens: int
    pool_bytes: int
    token_bytes: int  # 0 where every group slides
    sliding: tuple[tuple[Retention, int], ...] = ()  # (rule, bytes of a block)

    @classmethod
    def of(cls, layout: ArenaLayout, *, block_size: int) -> Footprint:
        """Return the footprint of a KV pool."""
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
        """Return the bytes of the blocks that are live after so many tokens, in all sliding groups."""
        total = 0
        for retention, block_bytes in self.sliding:
            num_blocks = -(-num_tokens // retention.block_size)
            run = num_blocks - min(num_blocks, retention.first_live_block(num_tokens))
            total += (run + min(retention.num_sink_blocks, num_blocks)) * block_bytes
        return total

    def usable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Return how many tokens of a prefix can be hit: whole hash blocks, at least one token short of the prompt."""
        return min(num_tokens, num_prompt_tokens - 1) // self.block_tokens * self.block_tokens


def hit_bounds(requests: Sequence[SimulatedRequest], footprint: Footprint) -> dict[str, int]:
    """Return hit tokens by bound."""
    full_alone = footprint.full_alone()
    everything = _reachable(content_paths(requests), footprint)
    return {
        "infinite": sum(everything),
        "full_alone_lru": _least_recent(content_paths(requests), full_alone),
        "full_alone_clairvoyant": Clairvoyant(content_paths(requests), full_alone, everything).run(),
        "clairvoyant": Clairvoyant(content_paths(requests), footprint, everything).run(),
    }


def _reachable(paths: Sequence[ContentPath], footprint: Footprint) -> list[int]:
    """Return the hit tokens of each request if nothing is evicted."""
    hits = []
    for path in paths:
        hits.append(footprint.usable(path.kept_prefix(), path.num_prompt_tokens))
        for node, num_tokens in path.steps:
            node.kept = max(node.kept, num_tokens)
    return hits


def _least_recent(paths: Sequence[ContentPath], footprint: Footprint) -> int:
    """Return the hit tokens if the least recently used contents are evicted first."""
    capacity_tokens = footprint.pool_bytes // max(1, footprint.token_bytes)
    by_age: OrderedDict[Node, None] = OrderedDict()
    num_kept = num_hit = 0
    for path in paths:
        num_hit += footprint.usable(path.kept_prefix(), path.num_prompt_tokens)
        for node, num_tokens in reversed(path.steps):  # a chain's far end goes first
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


class _Demand:
    """What is kept for one request to come: nodes of its path, the deepest last, and the checkpoint where it returns."""

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

    def cut(self, num_tokens: int) -> int:
        """Evict at most `num_tokens` tokens of the deepest node; return how many."""
        node = self.nodes[-1]
        dropped = min(node.kept, num_tokens)
        node.kept -= dropped
        self.num_tokens -= dropped
        if not node.kept:
            self.nodes.pop()
        return dropped


class Clairvoyant:
    """The clairvoyant policy; the module's docstring describes it."""

    def __init__(self, paths: Sequence[ContentPath], footprint: Footprint, reachable: Sequence[int]) -> None:
        self._paths = paths
        self._footprint = footprint
        self._reachable = reachable
        self._demands: dict[int, _Demand] = {}  # by the index of the request to come
        self._kept_bytes = 0

    def run(self) -> int:
        """Serve all requests; return their hit tokens."""
        return sum(self._serve(place, path) for place, path in enumerate(self._paths))

    def _serve(self, place: int, path: ContentPath) -> int:
        """Serve one request, keep what later ones read, and return its hit tokens."""
        hit = self._footprint.usable(path.kept_prefix(), path.num_prompt_tokens)
        demand = self._demands.pop(
            place, None
        )  # all that is kept of this path, since no other request reads it earlier
        if demand is not None:
            self._kept_bytes -= self._bytes(demand)
        used = path.num_tokens * self._footprint.token_bytes + self._footprint.checkpoint_bytes(path.num_tokens)
        self._make_room(place, self._footprint.pool_bytes - used)
        for node, num_tokens in path.steps:
            next_place = node.next_user(place)
            node.kept = 0 if next_place is None else max(node.kept, num_tokens)
            if next_place is not None:
                self._keep_for(next_place, node)
        return hit

    def _keep_for(self, place: int, node: Node) -> None:
        """Keep a node for the request at this index."""
        demand = self._demands.get(place)
        if demand is None:
            demand = _Demand(self._footprint.checkpoint_bytes(self._reachable[place]))
            self._demands[place] = demand
            self._kept_bytes += demand.checkpoint_bytes
        demand.add(node)
        self._kept_bytes += node.kept * self._footprint.token_bytes

    def _make_room(self, now: int, capacity_bytes: int) -> None:
        """Evict what costs most per token until the rest fits."""
        token_bytes = self._footprint.token_bytes
        while self._kept_bytes > capacity_bytes and self._demands:
            place, demand = max(self._demands.items(), key=lambda item: self._cost(now, *item))
            excess_tokens = -(-(self._kept_bytes - capacity_bytes) // max(1, token_bytes))
            self._kept_bytes -= demand.cut(excess_tokens) * token_bytes
            if not demand.nodes:
                self._kept_bytes -= demand.checkpoint_bytes
                del self._demands[place]

    def _cost(self, now: int, place: int, demand: _Demand) -> float:
        """Return bytes per token, times the requests that they must still be kept for."""
        return self._bytes(demand) / demand.num_tokens * (place - now)

    def _bytes(self, demand: _Demand) -> int:
        return demand.num_tokens * self._footprint.token_bytes + demand.checkpoint_bytes


def _depth(node: Node) -> int:
    return node.depth
