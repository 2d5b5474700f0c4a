"""`live(n)`: the table of the design, and what must hold for any kind. And where blocks of a group lie in pages.

`repair_start` against a dependency count over positions and layers, and against the known lengths.
"""

import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.core.kv_cache.window_repair_model import FULL, RULES, Layout, chunk, inexact_live, make_groups, state, window
from tests.how_many import num_examples
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_core.kv_cache.prefix_search import find_hit
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.window_repair import repair_start

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
LAYOUTS: dict[str, Layout] = {
    "window": [[window(6)]],
    "windows and full": [[window(6)], [FULL], [window(6)], [FULL]],
    "windows of two sizes": [[window(3)], [window(9)], [FULL], [window(5)]],
    "chunked": [[chunk(12)], [chunk(12)], [FULL], [chunk(12)]],
    "window of one": [[window(1)], [FULL], [window(8)], [window(1)]],
}


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


@given(st.integers(1, 40), st.integers(3, 20), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_ids_lie_inside_their_page_and_apart(num_pages: int, page_units: int, stride_units: list[int]) -> None:
    """Pages hold the blocks that lie wholly inside them; the dump block lies after all pages."""
    spec = group(GroupKind.FULL)
    groups = tuple(GroupLayout(spec=spec, block_bytes=u * 256, stride_bytes=u * 256, layers=()) for u in stride_units)
    layout = ArenaLayout(page_bytes=page_units * 256, num_pages=num_pages, groups=groups)
    for g, one in enumerate(groups):
        ids = [b for p in range(num_pages) for b in range(layout.first_block(p, g), layout.end_block(p, g))]
        assert ids == sorted(set(ids))
        for page in range(num_pages):
            for block in range(layout.first_block(page, g), layout.end_block(page, g)):
                begin = block * one.stride_bytes
                assert page * layout.page_bytes <= begin
                assert begin + one.stride_bytes <= (page + 1) * layout.page_bytes
        dump = layout.dump_block(g) * one.stride_bytes
        assert layout.pool_bytes <= dump
        assert dump + one.stride_bytes <= layout.slab_bytes
        assert layout.num_block_ids(g) == layout.dump_block(g) + 1


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_one_token_fewer_is_wrong(layout: Layout) -> None:
    specs = make_groups(layout, block_size=4)
    for n in (40, 44, 64, 72):
        s = repair_start(specs, n)
        assert s == n or inexact_live(specs, n, s + 1), n


@settings(max_examples=num_examples(40, 100), deadline=None)
@given(st.lists(st.lists(RULES, min_size=1, max_size=2), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_any_layout_is_exact_and_grows_with_n(layout: Layout, block_size: int) -> None:
    specs = make_groups(layout, block_size=block_size)
    starts = [repair_start(specs, n) for n in range(60)]
    assert starts == sorted(starts)
    assert all(0 <= s <= n for n, s in enumerate(starts))
    for n in (3 * block_size, 24, 48):
        assert not inexact_live(specs, n, starts[n])


def test_repair_lengths_of_known_models() -> None:
    """k * (W - 1) without rounding; chunked-local: n mod C whatever the depth."""
    n = 20_000
    gpt_oss_20b = make_groups([[window(128)], [FULL]] * 12, block_size=1)
    gpt_oss_120b = make_groups([[window(128)], [FULL]] * 18, block_size=1)
    gemma_3_27b = make_groups([[window(1024)] * 1 if i % 6 != 5 else [FULL] for i in range(62)], block_size=1)
    compressed = [dict(kind=GroupKind.COMPRESSED, ratio=4), state(4, 1)], [dict(kind=GroupKind.LATENT), state(128, 0)]
    deepseek_v4_flash = make_groups(
        [[window(128), *(compressed[i % 2] if i > 1 else ())] for i in range(43)], block_size=1
    )
    llama_4_scout = make_groups([[chunk(8192)] if i % 4 != 3 else [FULL] for i in range(48)], block_size=1)
    assert n - repair_start(gpt_oss_20b, n) == 1_524
    assert n - repair_start(gpt_oss_120b, n) == 2_286
    assert n - repair_start(deepseek_v4_flash, n) == 5_461
    assert repair_start(gemma_3_27b, n) == 0
    assert 60_000 - repair_start(gemma_3_27b, 60_000) == 53_196
    assert repair_start(llama_4_scout, n) == 16_384
    assert repair_start(llama_4_scout, 16_384) == 16_384


def test_blocks_round_the_top_window_down_alone() -> None:
    specs = make_groups([[window(128)], [FULL]] * 12, block_size=16)
    assert repair_start(specs, 20_000) == (20_000 - 127) // 16 * 16 - 11 * 127
