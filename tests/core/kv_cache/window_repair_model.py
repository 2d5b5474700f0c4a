"""Layouts by layer, and which positions a window repair leaves wrong: the brute force that `repair_start` is compared with."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from transom_core.kv_cache.groups import GroupKind, GroupSpec

FULL = dict(kind=GroupKind.FULL)


def window(size: int) -> dict[str, Any]:
    return dict(kind=GroupKind.WINDOW, window=size)


def chunk(size: int) -> dict[str, Any]:
    return dict(kind=GroupKind.CHUNK, chunk=size)


def sinks(sinks: int, window: int) -> dict[str, Any]:
    return dict(kind=GroupKind.SINKS_WINDOW, sinks=sinks, window=window)


def state(ratio: int, overlap: int) -> dict[str, Any]:
    return dict(kind=GroupKind.COMPRESSOR_STATE, ratio=ratio, overlap=overlap)


_IN_ENTRIES = (GroupKind.COMPRESSED, GroupKind.INDEXER)  # a block holds at least one entry

Layout = Sequence[Sequence[dict[str, Any]]]  # per layer, bottom first, the rules of its groups


def make_groups(layout: Layout, *, block_size: int) -> list[GroupSpec]:
    """Layers with an equal rule share a group."""
    members: dict[tuple[tuple[str, object], ...], list[int]] = {}
    for layer, rules in enumerate(layout):
        for rule in rules:
            members.setdefault(tuple(sorted(rule.items())), []).append(layer)
    return [_group(str(i), dict(rule), tuple(layers), block_size) for i, (rule, layers) in enumerate(members.items())]


def _group(name: str, rule: dict[str, Any], layers: tuple[int, ...], block_size: int) -> GroupSpec:
    if rule["kind"] in _IN_ENTRIES:
        block_size = max(block_size, rule["ratio"])
    return GroupSpec(name=name, layers=layers, block_size=block_size, **rule)


def read_by(spec: GroupSpec, query: int) -> set[int]:
    """Positions whose keys the layer computes itself and this query reads (its own included)."""
    if spec.keeps_everything or spec.kind is GroupKind.COMPRESSOR_STATE:
        return {query}  # entries below n are cached
    return {t for begin, end in spec.live(query) for t in range(begin, end)} | {query}


def cached(spec: GroupSpec, n: int) -> int:
    """Positions below this one are in the group's sink blocks."""
    return min(n, spec.num_sink_blocks * spec.block_size)


def inexact_live(specs: list[GroupSpec], n: int, s: int) -> bool:
    """Whether a repair of [s, n) leaves a wrong key in a block of `live(n)`: follows each position through the layers.

    Queries see sink tokens and keys from `s` on; a query that reads fewer keys than it should, or a wrong key, gives a wrong key.
    """
    exact = set(range(s, n))  # positions whose input to this layer is right: token ids are
    for layer in range(1 + max(layer for spec in specs for layer in spec.layers)):
        outputs = set(exact)
        for spec in (spec for spec in specs if layer in spec.layers):
            right = exact | set(range(cached(spec, n)))
            for query in exact:
                wanted = read_by(spec, query)
                hidden = {t for t in wanted if t < s and t >= spec.sinks}
                if hidden or not wanted <= right:
                    outputs.discard(query)
            if not spec.keeps_everything:
                blocks = {t // spec.block_size for begin, end in spec.live(n) for t in range(begin, end)}
                needed = {t for t in range(n) if t // spec.block_size in blocks}
                if not needed <= right:
                    return True
        exact = outputs
    return False


RULES = st.one_of(
    st.just(FULL),
    st.integers(1, 9).map(window),
    st.integers(1, 4).map(lambda size: dict(kind=GroupKind.CONVOLUTION, window=size)),
    st.integers(1, 14).map(chunk),
    st.tuples(st.integers(1, 7), st.integers(1, 9)).map(lambda sizes: sinks(*sizes)),
    st.tuples(st.sampled_from([2, 4, 8]), st.integers(0, 1)).map(lambda sizes: state(*sizes)),
)
COMPRESSED = st.tuples(st.sampled_from(_IN_ENTRIES), st.sampled_from([1, 2, 4, 8, 16])).map(
    lambda pair: dict(kind=pair[0], ratio=pair[1])
)
