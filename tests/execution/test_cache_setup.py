"""Groups from layers, and pages from strides."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_decoder import architecture, layer

from transom_worker.errors import ConfigError
from transom_worker.execution import cache_setup
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.layout import ArenaLayout, GroupLayout


def test_layers_with_equal_retention_share_a_group() -> None:
    shape = architecture([layer(8), layer(), layer(8), layer(8, sinks=2), layer(5), layer()])
    groups = cache_setup.make_groups(shape, block_size=4, hybrid=True)
    assert [(group.name, group.kind, group.layers) for group in groups] == [
        ("full", GroupKind.FULL, (1, 5)),
        ("window_8", GroupKind.WINDOW, (0, 2)),
        ("sinks_2_window_8", GroupKind.SINKS_WINDOW, (3,)),
        ("window_5", GroupKind.WINDOW, (4,)),
    ]
    assert cache_setup.group_of_layer(groups) == (1, 0, 1, 2, 3, 0)


def test_without_hybrid_one_full_group_holds_all_layers() -> None:
    shape = architecture([layer(8), layer(), layer(8, sinks=2)])
    groups = cache_setup.make_groups(shape, block_size=4, hybrid=False)
    assert groups == (GroupSpec(name="full", kind=GroupKind.FULL, layers=(0, 1, 2), block_size=4),)


def test_offsets_follow_layer_by_layer_k_before_v() -> None:
    shape = architecture([layer(), layer()])
    (group,) = cache_setup.make_groups(shape, block_size=3, hybrid=True)
    layout = cache_setup.group_layout(group, shape, "bfloat16")
    part = 3 * 2 * 8 * 2
    assert [(tensors.k_offset, tensors.v_offset) for tensors in layout.layers] == [(0, part), (2 * part, 3 * part)]
    assert (layout.block_bytes, layout.stride_bytes) == (4 * part, 512)


STRIDES = st.lists(st.integers(1, 400).map(lambda n: n * 256), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(strides=STRIDES, blocks=st.integers(40, 20_000))
def test_pages_hold_blocks_of_every_group(strides: list[int], blocks: int) -> None:
    pool = blocks * max(strides)
    choice = cache_setup.choose_page_bytes(strides, pool)
    layout = _layout(strides, choice.page_bytes, pool)
    for group, stride in enumerate(strides):
        counts = [layout.end_block(page, group) - layout.first_block(page, group) for page in range(layout.num_pages)]
        assert min(counts) >= cache_setup.least_blocks(choice.page_bytes, stride) >= 1
    assert layout.pool_bytes <= pool


@settings(deadline=None, max_examples=60)
@given(strides=STRIDES)
def test_edge_waste_is_the_mean_over_all_placements(strides: list[int]) -> None:
    page = max(strides) * 3 + 256
    for stride in strides:
        layout = _layout([stride], page, page * (stride // math.gcd(page, stride)))
        used = sum(layout.end_block(p, 0) - layout.first_block(p, 0) for p in range(layout.num_pages)) * stride
        assert cache_setup.geometry_waste(layout) == pytest.approx(1 - used / layout.pool_bytes)


@pytest.mark.parametrize(
    ("strides", "pool", "waste"),
    [
        ([368_640], 5 * 2**30, 0.002),  # SmolLM2-135M in bfloat16, all layers full
        ([122_880, 245_760], 5 * 2**30, 0.002),  # SSF on it
        ([24_576, 368_640, 94_208], 2**32, 0.05),
    ],
)
def test_large_pools_waste_little(strides: list[int], pool: int, waste: float) -> None:
    choice = cache_setup.choose_page_bytes(strides, pool)
    assert choice.waste <= waste
    assert choice.page_bytes <= 2 * 2**20
    assert pool // choice.page_bytes >= 1000
    assert all(choice.page_bytes // stride >= 4 for stride in strides)


def test_small_pools_take_smaller_pages() -> None:
    assert cache_setup.choose_page_bytes([4096], 20 * 4096).page_bytes <= 4 * 4096
    assert cache_setup.choose_page_bytes([4096], 4096) == cache_setup.PageChoice(page_bytes=4096, waste=0.0)


def test_a_pool_without_room_for_a_block_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"pool of 9000 bytes .* 2 cache group\(s\), which take 8192, 4096 bytes"):
        cache_setup.choose_page_bytes([8192, 4096], 9000)


def _layout(strides: list[int], page_bytes: int, pool: int) -> ArenaLayout:
    spec = GroupSpec(name="full", kind=GroupKind.FULL, layers=(), block_size=1)
    groups = tuple(GroupLayout(spec=spec, block_bytes=stride, stride_bytes=stride, layers=()) for stride in strides)
    return ArenaLayout(page_bytes=page_bytes, num_pages=pool // page_bytes, groups=groups)
