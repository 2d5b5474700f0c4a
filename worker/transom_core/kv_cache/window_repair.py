"""Window repair: from which token on must be computed again, so that all sliding groups get exact blocks at a boundary.

Terms:

    boundary n     tokens `[0, n)` are known and cached in the *full groups* (groups that keep every token)
    sliding group  a group with a window, chunk, convolution or compressor state; its blocks that token `n` reads are gone
    exact          equal to what computing the whole prompt gives
    sink blocks    a sliding group's first blocks, which hold attention sinks; they must be cached

In a full group a layer reads the cache, so its output at a position needs no other position. In a window layer the output at
position p needs keys at the W - 1 positions before p, and these need the output of the layer below at those positions. So the range
that must be exact grows by W - 1 with each window layer, from the top layer down. Example: n = 1,000, three window layers with W =
101:

    layer 5 (window)   exact keys from 900 on      because token 1,000 reads [900, 1,000)
    layer 3 (window)   exact keys from 800 on      because layer 5's keys at 900 need layer 3's output at 900
    layer 1 (window)   exact keys from 700 on      so the repair starts at token 700

Recurrent layers have no bounded range: their state at a position depends on all tokens before it. A model with such layers has no
repair; it computes again from the last boundary that has a snapshot.

Keys that the repair computes below a layer's exact range are wrong, but no exact output reads them. A start is never above the
first token of a group's first live block, since the repair must fill whole blocks.
"""

from collections.abc import Sequence
from functools import lru_cache

from transom_core.kv_cache.groups import GroupKind, GroupSpec


def repair_start(specs: Sequence[GroupSpec], n: int) -> int:
    """Return the first token to compute again, so that every sliding group's live blocks at boundary `n` are exact.

    It is `n` if there are no sliding groups, 0 if a repair is impossible, and it never decreases as `n` grows.
    """
    specs = tuple(specs)
    if any(spec.is_state for spec in specs):
        return 0
    # By group: the first token of the blocks that a repair must fill for `live(n)`, except sink blocks.
    own = [n if spec.keeps_everything else spec.first_live_block(n) * spec.block_size for spec in specs]
    low = n  # the layers above the current one need its output at [low, n)
    for groups, num_layers in _sliding_layers(specs):
        low = min(min(own[group], _lowest_read(specs[group], low)) for group in groups)
        # The run's second layer reads from `low` on, which is not above `own`. Each window layer lowers it by W - 1; a chunk's
        # start stays the same from there on.
        if num_layers > 1:
            spec = specs[groups[0]]
            low = max(0, low - (num_layers - 1) * (spec.window - 1)) if spec.is_window else _lowest_read(spec, low)
    return low


def _lowest_read(spec: GroupSpec, query: int) -> int:
    """Return the lowest position, except sink tokens, that queries from position `query` on read in a group."""
    if spec.is_window:
        return max(0, query - (spec.window - 1))
    # everything but chunks is read from the cache
    return query - query % spec.chunk if spec.kind is GroupKind.CHUNK else query


@lru_cache(maxsize=64)
def _sliding_layers(specs: tuple[GroupSpec, ...]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the sliding groups of each layer that has any, the top layer first, as runs: (groups, number of layers). A run of
    several layers has one group."""
    layers: dict[int, list[int]] = {}
    for group, spec in enumerate(specs):
        if not spec.keeps_everything:
            for layer in spec.layers:
                layers.setdefault(layer, []).append(group)
    runs: list[tuple[tuple[int, ...], int]] = []
    for layer in sorted(layers, reverse=True):
        groups = tuple(layers[layer])
        if runs and runs[-1][0] == groups and len(groups) == 1:
            runs[-1] = (groups, runs[-1][1] + 1)
        else:
            runs.append((groups, 1))
    return tuple(runs)
