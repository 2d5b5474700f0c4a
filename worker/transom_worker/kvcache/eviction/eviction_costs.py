"""`EvictionCosts`: the tokens that evicting a part of the prefix cache loses and the bytes that it frees; policies rank nodes by
both (`eviction_policy`).

If windows are evicted while the full groups keep their blocks, a window repair can compute the windows again, so fewer tokens are
lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.kv_cache.window_repair import repair_start
from transom_worker.kvcache.prefix.tree import Node


class EvictionCosts:
    """Tokens lost and bytes freed. `stride_bytes` are a block's bytes by group; `repair`: window repairs are allowed."""

    def __init__(self, stride_bytes: Sequence[int], *, block_size: int, repair: bool) -> None:
        self._stride_bytes = stride_bytes
        self._block_size = block_size
        self._repair = repair

    def of_leaf(self, node: Node) -> tuple[int, int]:
        """Return the tokens lost and the bytes freed if a leaf is evicted."""
        lost = (node.boundary - node.checkpoint_below().boundary) * self._block_size
        if node.windows is None:
            lost = max(0, lost - self._repair_tokens(node))
        hash_block_bytes = sum(self._stride_bytes[group] // count for group, count in node.retentions.full_groups)
        return lost, len(node.segment) * hash_block_bytes + self._window_bytes(node)

    def of_windows(self, node: Node) -> tuple[int, int]:
        """Return the tokens lost and the bytes freed if a node's windows are evicted and its segment stays."""
        lost = (node.boundary - node.checkpoint_below().boundary) * self._block_size
        lost = min(lost, self._repair_tokens(node))
        return lost, self._window_bytes(node)

    def _window_bytes(self, node: Node) -> int:
        """Return the bytes of a node's windows; blocks that it shares with the checkpoint nearer to the root count only there."""
        if node.windows is None:
            return 0
        below = node.checkpoint_below().boundary
        return sum(
            min(len(digests), node.boundary - below) * self._stride_bytes[group]
            for (group, _), digests in zip(node.retentions.sliding_groups, node.windows, strict=True)
        )

    def _repair_tokens(self, node: Node) -> int:
        """Return how many tokens a window repair at a node's boundary computes; all tokens up to it if no repair is possible."""
        n = node.boundary * self._block_size
        can_repair = self._repair and node.retentions.full_groups
        return n - repair_start(node.retentions.specs, n) if can_repair else n
