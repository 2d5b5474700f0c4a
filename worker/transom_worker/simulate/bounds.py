"""What other caches of the same bytes could hit at most, one request at a time: the measure of how far a policy can go.

`infinite`: nothing is ever evicted. `full_alone_lru`: the pool holds the full-length groups' blocks and nothing else, least
recently used out first. `full_alone_clairvoyant` and `clairvoyant` know the future.

The clairvoyant keeps contents only for a request to come, the next one that reads them. When memory is short it gives up, token
by token from the far end, what costs most per token that it saves: bytes, times how long they must still be kept. Without
windows every token costs the same and this is Belady's rule: whatever is used furthest in the future goes first. With windows
each request to come is charged one checkpoint, the window blocks that are live where it will return; so a long wait for a short
prefix goes before a long one. It is an approximation: too high in that nothing else takes memory (pages without waste, no steps
in flight) and that checkpoints are always where they are needed; too low in that greedy choices are not the best ones where
blocks differ in worth. A run of tokens (a message, or what one hash id stands for) is the grain of sharing; hits are cut to
whole units.
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
    """Bytes that a cache needs: per token for ever, and at a boundary for the windows that are live there."""

    unit_tokens: int
    pool_bytes: int
    token_bytes: int  # 0 where every group slides
    sliding: tuple[tuple[Retention, int], ...] = ()  # (rule, bytes of a block)

    @classmethod
    def of(cls, layout: ArenaLayout, *, block_size: int) -> Footprint:
        """That of a real pool."""
        everything = [group for group in layout.groups if group.spec.keeps_everything]
        sliding = [group for group in layout.groups if not group.spec.keeps_everything]
        return cls(
            unit_tokens=block_size,
            pool_bytes=layout.pool_bytes,
            token_bytes=sum(group.stride_bytes // group.spec.block_size for group in everything),
            sliding=tuple((Retention(group.spec), group.stride_bytes) for group in sliding),
        )

    def full_alone(self) -> Footprint:
        """The same without windows."""
        return Footprint(unit_tokens=self.unit_tokens, pool_bytes=self.pool_bytes, token_bytes=self.token_bytes)

    def checkpoint_bytes(self, num_tokens: int) -> int:
        """Of the blocks live after so many tokens, in all sliding groups."""
        total = 0
        for retention, block_bytes in self.sliding:
            num_blocks = -(-num_tokens // retention.block_size)
            run = num_blocks - min(num_blocks, retention.first_live_block(num_tokens))
            total += (run + min(retention.num_sink_blocks, num_blocks)) * block_bytes
        return total

    def usable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Whole units of a prefix, at least one token short of the prompt."""
        return min(num_tokens, num_prompt_tokens - 1) // self.unit_tokens * self.unit_tokens


def hit_bounds(requests: Sequence[SimulatedRequest], footprint: Footprint) -> dict[str, int]:
    """Hit tokens by bound."""
    full_alone = footprint.full_alone()
    everything = _reachable(content_paths(requests), footprint)
    return {
        "infinite": sum(everything),
        "full_alone_lru": _least_recent(content_paths(requests), full_alone),
        "full_alone_clairvoyant": Clairvoyant(content_paths(requests), full_alone, everything).run(),
        "clairvoyant": Clairvoyant(content_paths(requests), footprint, everything).run(),
    }


def _reachable(paths: Sequence[ContentPath], footprint: Footprint) -> list[int]:
    """Hit tokens of each request where nothing is evicted."""
    hits = []
    for path in paths:
        hits.append(footprint.usable(path.kept_prefix(), path.num_prompt_tokens))
        for node, num_tokens in path.steps:
            node.kept = max(node.kept, num_tokens)
    return hits


def _least_recent(paths: Sequence[ContentPath], footprint: Footprint) -> int:
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
    """What is kept for one request to come: nodes of its path, deepest last, and the checkpoint where it returns."""

    __slots__ = ("checkpoint_bytes", "nodes", "num_tokens")

    def __init__(self, checkpoint_bytes: int) -> None:
        self.checkpoint_bytes = checkpoint_bytes
        self.nodes: list[Node] = []
        self.num_tokens = 0

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.nodes.sort(key=_depth)
        self.num_tokens += node.kept

    def cut(self, num_tokens: int) -> int:
        """Give up tokens from the far end, at most `num_tokens`, in one node; returns how many."""
        node = self.nodes[-1]
        dropped = min(node.kept, num_tokens)
        node.kept -= dropped
        self.num_tokens -= dropped
        if not node.kept:
            self.nodes.pop()
        return dropped


class Clairvoyant:
    """See the module's docstring."""

    def __init__(self, paths: Sequence[ContentPath], footprint: Footprint, reachable: Sequence[int]) -> None:
        self._paths = paths
        self._footprint = footprint
        self._reachable = reachable
        self._demands: dict[int, _Demand] = {}  # by the place of the request to come
        self._kept_bytes = 0

    def run(self) -> int:
        """Hit tokens over all requests."""
        return sum(self._serve(place, path) for place, path in enumerate(self._paths))

    def _serve(self, place: int, path: ContentPath) -> int:
        hit = self._footprint.usable(path.kept_prefix(), path.num_prompt_tokens)
        demand = self._demands.pop(place, None)  # all that is kept of this path: nobody reads it earlier
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
        demand = self._demands.get(place)
        if demand is None:
            demand = _Demand(self._footprint.checkpoint_bytes(self._reachable[place]))
            self._demands[place] = demand
            self._kept_bytes += demand.checkpoint_bytes
        demand.add(node)
        self._kept_bytes += node.kept * self._footprint.token_bytes

    def _make_room(self, now: int, capacity_bytes: int) -> None:
        token_bytes = self._footprint.token_bytes
        while self._kept_bytes > capacity_bytes and self._demands:
            place, demand = max(self._demands.items(), key=lambda item: self._cost(now, *item))
            excess_tokens = -(-(self._kept_bytes - capacity_bytes) // max(1, token_bytes))
            self._kept_bytes -= demand.cut(excess_tokens) * token_bytes
            if not demand.nodes:
                self._kept_bytes -= demand.checkpoint_bytes
                del self._demands[place]

    def _cost(self, now: int, place: int, demand: _Demand) -> float:
        return self._bytes(demand) / demand.num_tokens * (place - now)

    def _bytes(self, demand: _Demand) -> int:
        return demand.num_tokens * self._footprint.token_bytes + demand.checkpoint_bytes


def _depth(node: Node) -> int:
    return node.depth
