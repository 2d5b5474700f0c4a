"""Pages for blocks of any sizes: every group finds room in each, and little is lost."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.worker.planner.model_configs import CONFIGS
from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_core.model_config.architecture import read_architecture
from transom_worker.planner.blocks import cache_groups
from transom_worker.planner.pages import MAX_PAGES, group_waste, make_host_layout, make_layout

SIZES = st.lists(st.integers(1, 400 * 256), min_size=1, max_size=4)


def layout_of(sizes: list[int], pool: int) -> ArenaLayout:
    spec = GroupSpec(name="full", kind=GroupKind.FULL, layers=(), block_size=1)
    groups = [GroupLayout(spec=spec, block_bytes=size, stride_bytes=0, layers=()) for size in sizes]
    return make_layout(groups, pool)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, blocks=st.integers(40, 20_000))
def test_pages_hold_as_many_blocks_of_each_group_everywhere(sizes: list[int], blocks: int) -> None:
    pool = blocks * 256 * -(-max(sizes) // 256)
    layout = layout_of(sizes, pool)
    assert layout.pool_bytes <= pool
    assert len(sizes) <= layout.num_pages <= MAX_PAGES
    for index, (group, size) in enumerate(zip(layout.groups, sizes, strict=True)):
        assert group.stride_bytes >= size
        assert group.stride_bytes % 256 == 0
        counts = {layout.end_block(p, index) - layout.first_block(p, index) for p in range(min(200, layout.num_pages))}
        assert counts == {layout.blocks_per_page(index)}
        assert min(counts) >= 1
        assert group_waste(layout, index) == pytest.approx(1 - min(counts) * size / layout.page_bytes)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(CONFIGS, ("bfloat16", "fp8")),
        *itertools.product(("gpt-oss-20b", "gemma-3-27b", "gemma-4-31b-like"), ("int4", "full=int8")),
    ],
)
def test_thousand_pages_waste_less_than_two_percent(name: str, dtype: str, ranks: int) -> None:
    groups = cache_groups(
        read_architecture(CONFIGS[name]),
        block_size=16,
        dtype="bfloat16",
        kv_cache_dtype=dtype,
        tensor_parallel_size=ranks,
    )
    for pool_gib in (1, 3, 6, 10, 13, 16, 20, 27, 40, 55, 80, 141)[:: num_examples(daily=4, exhaustive=1)]:
        layout = make_layout(groups, pool_gib * 2**30)
        waste = max(group_waste(layout, index) for index in range(len(groups)))
        assert layout.num_pages < 1000 or waste < 0.02
        assert waste < 0.005 or "deepseek" in name or ranks == 3 or pool_gib < 3 or dtype != "bfloat16"


@pytest.mark.parametrize(
    ("sizes", "pool", "page"),
    [
        ([368_640], 5 * 2**30, 368_640),  # SmolLM2-135M in bfloat16, all layers full
        ([122_880, 245_760], 4 * 2**30, 245_760),  # SSF on it
        ([1_310_720, 13_107_200], 40 * 2**30, 13_107_200),  # gemma-4-like: a window's block is ten full ones
        ([1_310_720, 6_815_744], 40 * 2**30, 34_078_720),  # gemma-3-27b: their least common multiple
    ],
)
def test_pages_are_the_smallest_that_fit_evenly(sizes: list[int], pool: int, page: int) -> None:
    layout = layout_of(sizes, pool)
    assert layout.page_bytes == page
    assert [group.stride_bytes for group in layout.groups] == sizes
    assert [group_waste(layout, index) for index in range(len(sizes))] == [0.0] * len(sizes)


def test_strides_are_padded_where_that_loses_less() -> None:
    layout = layout_of([100 * 256, 33 * 256], 10_000 * 256)
    assert layout.page_bytes == 102 * 256
    assert [group.stride_bytes for group in layout.groups] == [102 * 256, 34 * 256]
    assert group_waste(layout, 1) == pytest.approx(1 - 33 / 34)


def test_a_pool_of_one_page_per_group_is_enough_and_less_is_refused_with_numbers() -> None:
    assert layout_of([4096], 4096).page_bytes == 4096
    assert layout_of([8192, 4000], 16384).page_bytes == 8192
    with pytest.raises(ConfigError, match=r"16383 bytes .* each of 2 cache group\(s\), which take 8192, 4096 bytes"):
        layout_of([8192, 4000], 16383)


def test_a_host_tier_under_a_page_for_each_group_is_refused_with_a_size_that_is_enough() -> None:
    layout = layout_of([2560, 2560], 10**6)
    with pytest.raises(ConfigError, match=r"--swap-space at least (\d+)KiB") as refused:
        make_host_layout(layout, 100)
    least_kib = int(re.findall(r"(\d+)KiB", str(refused.value))[0])
    assert make_host_layout(layout, least_kib << 10).num_pages == 2
