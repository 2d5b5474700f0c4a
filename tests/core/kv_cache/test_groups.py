"""`live(n)`: the table of the design, and what must hold for any kind."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.prefix_search import find_hit
from transom_core.kv_cache.retention import Retention

KINDS = st.one_of(
    st.just(dict(kind=GroupKind.FULL)),
    st.just(dict(kind=GroupKind.LATENT)),
    st.builds(lambda w: dict(kind=GroupKind.WINDOW, window=w), st.integers(1, 40)),
    st.builds(lambda w: dict(kind=GroupKind.CONVOLUTION, window=w), st.integers(1, 5)),
    st.just(dict(kind=GroupKind.STATE, window=2)),
    st.builds(lambda c: dict(kind=GroupKind.CHUNK, chunk=c), st.integers(1, 40)),
    st.builds(
        lambda s, w: dict(kind=GroupKind.SINKS_WINDOW, sinks=s, window=w), st.integers(1, 12), st.integers(1, 40)
    ),
    st.builds(lambda r: dict(kind=GroupKind.COMPRESSED, ratio=r), st.integers(1, 8)),
    st.builds(
        lambda r, o: dict(kind=GroupKind.COMPRESSOR_STATE, ratio=r, overlap=o), st.integers(1, 8), st.integers(0, 2)
    ),
)
SPECS = st.builds(
    lambda size, kind: GroupSpec(name="g", layers=(), block_size=size, **kind), st.sampled_from([1, 3, 4, 16]), KINDS
)


def group(kind: GroupKind, **sizes: int) -> GroupSpec:
    return GroupSpec(name="g", kind=kind, layers=(), block_size=16, **sizes)


@pytest.mark.parametrize(
    ("spec", "n", "live"),
    [
        (group(GroupKind.FULL), 0, ()),
        (group(GroupKind.FULL), 9, ((0, 9),)),
        (group(GroupKind.WINDOW, window=128), 127, ((0, 127),)),
        (group(GroupKind.WINDOW, window=128), 128, ((1, 128),)),
        (group(GroupKind.WINDOW, window=128), 1000, ((873, 1000),)),
        (group(GroupKind.WINDOW, window=1), 7, ()),
        (group(GroupKind.CONVOLUTION, window=3), 1000, ((998, 1000),)),
        (group(GroupKind.STATE, window=2), 1000, ((999, 1000),)),
        (group(GroupKind.CHUNK, chunk=8192), 8191, ((0, 8191),)),
        (group(GroupKind.CHUNK, chunk=8192), 8192, ()),
        (group(GroupKind.CHUNK, chunk=8192), 20000, ((16384, 20000),)),
        (group(GroupKind.SINKS_WINDOW, sinks=4, window=8), 3, ((0, 3),)),
        (group(GroupKind.SINKS_WINDOW, sinks=4, window=8), 20, ((0, 4), (13, 20))),
        (group(GroupKind.COMPRESSED, ratio=4), 11, ((0, 8),)),
        (group(GroupKind.COMPRESSOR_STATE, ratio=4, overlap=1), 11, ((4, 11),)),
    ],
)
def test_live_as_designed(spec: GroupSpec, n: int, live: tuple[tuple[int, int], ...]) -> None:
    assert spec.live(n) == live


@given(SPECS, st.integers(0, 200))
def test_live_is_inside_the_past_and_lower_bounds_grow(spec: GroupSpec, n: int) -> None:
    now, later = spec.live(n), spec.live(n + 1)
    assert all(0 <= begin < end <= n for begin, end in now)
    needed_later = {token for begin, end in later for token in range(begin, end)}
    needed_now = {token for begin, end in now for token in range(begin, end)}
    if spec.kind not in (GroupKind.COMPRESSED, GroupKind.INDEXER):  # an entry appears when its r tokens are there
        assert needed_later - {n} <= needed_now  # what was let go is never wanted again


@given(SPECS, st.integers(0, 150))
def test_nothing_can_be_freed_before_the_next_change(spec: GroupSpec, n: int) -> None:
    retention = Retention(spec)
    change = retention.next_change(n)
    boundary = (n // spec.block_size + 1) * spec.block_size
    assert n < change <= boundary
    if n == boundary - spec.block_size:  # asked at every boundary and at every change
        assert all(retention.first_live_block(m) == retention.first_live_block(n) for m in range(n, change))


@given(SPECS, st.integers(0, 60))
def test_a_free_boundary_needs_no_block_of_the_run(spec: GroupSpec, boundary: int) -> None:
    assume(not spec.keeps_everything)
    retention = Retention(spec)
    free = [b for b in range(boundary + 1) if retention.first_live_block(b * spec.block_size) >= b]
    assert retention.largest_free_boundary(boundary) == max(free)


def test_a_window_builds_nothing_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send a new window with each prompt of a million tokens; a table cost the router 1.4 s each time."""
    num_calls = 0
    live = GroupSpec.live

    def counted(spec: GroupSpec, n: int) -> tuple[tuple[int, int], ...]:
        nonlocal num_calls
        num_calls += 1
        return live(spec, n)

    monkeypatch.setattr(GroupSpec, "live", counted)
    retention = Retention(group(GroupKind.FULL).with_window(sinks=0, window=100))
    assert retention.peak_blocks(1_000_000) == 8
    # when token 999,904, the first of a block, is the first live one
    assert retention.next_change(1_000_000) == 1_000_003
    assert retention.largest_free_boundary(62_500) == 0
    assert find_hit([retention], [set()], [bytes(32)] * 62_500, 62_500, window_repair=False).start == 0
    assert num_calls < 20


@given(SPECS)
def test_held_and_peak_blocks_are_what_live_touches(spec: GroupSpec) -> None:
    assume(spec.kind is not GroupKind.COMPRESSED)  # its entries have blocks before `live` names their tokens
    retention, peak, size = Retention(spec), 0, spec.block_size
    for n in range(100):
        held = {n // size, *range(min(retention.num_sink_blocks, n // size + 1))}
        for begin, end in spec.live(n):
            held.update(range(begin // size, -(-end // size)))
        peak = max(peak, len(held))
        assert retention.allocated_blocks(n) == (1 if spec.is_state else len(held))
        assert retention.peak_blocks(n + 1) == peak


def test_blocks_of_a_step_without_its_result_stay() -> None:
    retention = Retention(GroupSpec(name="g", layers=(0,), block_size=4, kind=GroupKind.WINDOW, window=5))
    assert [retention.allocated_blocks(n) for n in (16, 17, 18, 19)] == [2, 2, 2, 2]
    assert [retention.allocated_blocks(n, lag=1) for n in (16, 17, 18, 19)] == [3, 2, 2, 2]
