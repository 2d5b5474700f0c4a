"""Blocks held and their peaks against counting what `live` touches; the normative figures of sliding windows."""

from __future__ import annotations

import pytest

from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.retention import Retention

RULES = (
    [dict(kind=GroupKind.FULL)]
    + [dict(kind=GroupKind.WINDOW, window=w) for w in (1, 2, 10, 16, 17)]
    + [dict(kind=GroupKind.CHUNK, chunk=c) for c in (1, 10, 12, 16)]
    + [dict(kind=GroupKind.SINKS_WINDOW, window=w, sinks=s) for w in (1, 7, 20) for s in (1, 5, 17)]
    + [dict(kind=GroupKind.COMPRESSOR_STATE, ratio=r, overlap=o) for r in (4, 6) for o in (0, 1)]
)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(str(value) for value in rule.values()))
def test_held_and_peak_blocks_are_what_live_touches(rule: dict[str, object], block_size: int) -> None:
    retention = Retention(GroupSpec(name="g", layers=(0,), block_size=block_size, **rule))  # type: ignore[arg-type]
    peak = 0
    for n in range(200):
        held = {n // block_size, *range(min(retention.num_sink_blocks, n // block_size + 1))}
        for begin, end in retention.spec.live(n):
            held.update(range(begin // block_size, -(-end // block_size)))
        peak = max(peak, len(held))
        assert retention.allocated_blocks(n) == len(held)
        assert retention.peak_blocks(n + 1) == peak


def test_blocks_of_a_step_without_its_result_stay() -> None:
    retention = Retention(GroupSpec(name="g", layers=(0,), block_size=4, kind=GroupKind.WINDOW, window=5))
    assert [retention.allocated_blocks(n) for n in (16, 17, 18, 19)] == [2, 2, 2, 2]
    assert [retention.allocated_blocks(n, lag=1) for n in (16, 17, 18, 19)] == [3, 2, 2, 2]


@pytest.mark.parametrize(
    ("kind", "size", "skipped"),
    [
        (GroupKind.WINDOW, 128, {127: 0, 128: 1, 143: 16, 144: 17, 1000: 873}),
        (GroupKind.CHUNK, 8192, {8191: 0, 8192: 8192, 20000: 16384}),
    ],
)
def test_skipped_tokens(kind: GroupKind, size: int, skipped: dict[int, int]) -> None:
    sizes = {"window" if kind is GroupKind.WINDOW else "chunk": size}
    retention = Retention(GroupSpec(name="g", layers=(0,), block_size=16, kind=kind, **sizes))
    for n, tokens in skipped.items():
        begin = min((begin for begin, _ in retention.spec.live(n)), default=n)
        assert begin == tokens
        assert retention.first_live_block(n) == tokens // 16


@pytest.mark.parametrize(
    ("rule", "live"),
    [
        (dict(kind=GroupKind.FULL), {1000: 1000}),
        (dict(kind=GroupKind.WINDOW, window=128), {50: 50, 1000: 127}),
        (dict(kind=GroupKind.CHUNK, chunk=8192), {8192: 0, 20000: 20000 % 8192}),
        (dict(kind=GroupKind.COMPRESSOR_STATE, ratio=4, overlap=1), {128: 4, 131: 7}),
        (dict(kind=GroupKind.COMPRESSOR_STATE, ratio=128), {128: 0, 131: 3}),
    ],
)
def test_live_tokens_at_a_boundary(rule: dict[str, object], live: dict[int, int]) -> None:
    spec = GroupSpec(name="g", layers=(0,), block_size=16, **rule)  # type: ignore[arg-type]
    for n, tokens in live.items():
        assert sum(end - begin for begin, end in spec.live(n)) == tokens
