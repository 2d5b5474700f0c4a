"""Exact window repair: from which position a tail must be computed again so that all sliding groups' `live(n)` is exact.

The groups that keep everything hold [0, n), so a layer's output at a position needs only that layer's own recent keys and values,
and those need the output of the layer below at their positions. So the positions that must be exact grow downwards, layer by
layer; replaying from where the lowest layer needs its input is enough. What a replay computes below a layer's need is wrong
there, and nothing exact reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transom_worker.kvcache.groups import GroupKind, GroupSpec


def repair_start(specs: Sequence[GroupSpec], n: int) -> int:
    """First position to compute again, in tokens, so that every sliding group's blocks of `live(n)` are exact.

    Pinned sink blocks must be there. Equal to `n` without sliding groups; grows with `n`.
    """
    specs = tuple(specs)
    own = [_own_start(spec, n) for spec in specs]
    low = n  # the layers above this one need its output at [low, n)
    for layer in _sliding_by_layer(specs):
        low = min(min(own[group], _lowest_read(specs[group], low)) for group in layer)
    return low


def _own_start(spec: GroupSpec, n: int) -> int:
    """Where the blocks begin that a replay must fill for `live(n)`; pinned ones are there."""
    if spec.keeps_everything:
        return n
    ranges = spec.live(n)
    begin = ranges[-1][0] if ranges and ranges[-1][1] == n else n
    return max(spec.num_sink_blocks, begin // spec.block_size) * spec.block_size


def _lowest_read(spec: GroupSpec, query: int) -> int:
    """The lowest of the group's positions that queries from `query` on read, sink tokens aside."""
    match spec.kind:
        case GroupKind.WINDOW | GroupKind.SINKS_WINDOW:
            return max(0, query - (spec.window - 1))
        case GroupKind.CHUNK:
            return query - query % spec.chunk
        case _:  # everything else is read from the cache
            return query


@lru_cache(maxsize=64)
def _sliding_by_layer(specs: tuple[GroupSpec, ...]) -> tuple[tuple[int, ...], ...]:
    """Indices of each layer's sliding groups, the top layer first; layers without one left out."""
    layers: dict[int, list[int]] = {}
    for group, spec in enumerate(specs):
        if not spec.keeps_everything:
            for layer in spec.layers:
                layers.setdefault(layer, []).append(group)
    return tuple(tuple(layers[layer]) for layer in sorted(layers, reverse=True))
