"""What each rank holds: everything once, queries beside the KV heads that they read, blocks inside the common stride; and pages
for blocks of any sizes: every group finds room in each, and little is lost."""

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.worker.planner.model_configs import CONFIGS
from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import DTYPE_BYTES, ArenaLayout, GroupLayout
from transom_core.model_config.architecture import Architecture, LayerAttention, read_architecture
from transom_core.model_config.rank_shares import rank_lines, rank_shares, replicated_parts
from transom_core.model_config.sharding import check_size, head_share, kv_holders, largest_size, width_share
from transom_worker.planner.blocks import cache_groups, rank_layout
from transom_worker.planner.pages import MAX_PAGES, group_waste, make_host_layout, make_layout
from transom_worker.planner.plan import plan_from_config

LLAMA = read_architecture(CONFIGS["llama-3-8b"])
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 4}


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Layers with heads of their own, some with windows, the last reading the caches of earlier ones."""
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        num_kv = draw(st.integers(1, 6))
        layers.append(
            LayerAttention(
                num_heads=num_kv * draw(st.integers(1, 4)),
                num_kv_heads=num_kv,
                head_size=draw(st.sampled_from([8, 24])),
                window=draw(st.sampled_from([None, 16])),
            )
        )
    source = draw(st.integers(0, len(layers) - 1))
    reader = replace(layers[source], num_heads=layers[source].num_kv_heads * 2, reads_cache_of=source)
    return replace(LLAMA, layers=tuple([*layers, *[reader] * draw(st.integers(0, 1))]))


def spans(parts: list[slice]) -> list[int]:
    return [unit for part in parts for unit in range(part.start, part.stop)]


@given(architecture=architectures(), data=st.data())
def test_heads_are_dealt_whole_and_blocks_fit(architecture: Architecture, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, largest_size(architecture).size))
    for index, layer in enumerate(architecture.layers):
        shares = [head_share(architecture, index, rank, size) for rank in range(size)]
        assert spans([share.queries for share in shares]) == list(range(layer.num_heads))
        source = layer if layer.reads_cache_of is None else architecture.layers[layer.reads_cache_of]
        readers = layer.num_heads // source.num_kv_heads
        for rank, share in enumerate(shares):
            queries = range(share.queries.start, share.queries.stop)
            assert queries
            assert {query // readers for query in queries} == set(range(share.kv.start, share.kv.stop))
            # a kernel maps its own query heads to its own KV heads by this quotient alone
            group = share.num_queries // share.num_kv
            assert [(q - queries[0]) // group for q in queries] == [q // readers - share.kv.start for q in queries]
            for head in range(share.kv.start, share.kv.stop):
                assert rank in kv_holders(source.num_kv_heads, head, size)
            if layer.reads_cache_of is not None:
                assert share.kv == head_share(architecture, layer.reads_cache_of, rank, size).kv
    check_blocks(architecture, size)


def check_blocks(architecture: Architecture, size: int) -> None:
    layout = make_layout(cache_groups(architecture, block_size=16, dtype="float32", tensor_parallel_size=size), 1 << 24)
    for rank in range(size):
        own = cache_groups(architecture, block_size=16, dtype="float32", tensor_parallel_size=size, rank=rank)
        placed = rank_layout(layout, own)
        assert (placed.page_bytes, placed.num_pages) == (layout.page_bytes, layout.num_pages)
        for index, (group, common) in enumerate(zip(placed.groups, layout.groups, strict=True)):
            assert group.stride_bytes == common.stride_bytes >= group.block_bytes > 0
            assert placed.dump_block(index) == layout.dump_block(index)
            for part in group.layers:
                assert part.num_kv_heads == head_share(architecture, part.layer, rank, size).num_kv
                row_bytes = DTYPE_BYTES[part.dtype] * group.rows_per_block * part.num_kv_heads
                assert part.v_offset + row_bytes * part.v_size <= group.block_bytes


def test_another_ranks_layout_is_refused() -> None:
    architecture = read_architecture(CONFIGS["llama-3-8b"] | NINE_HEADS)
    small, large = (
        cache_groups(architecture, block_size=16, dtype="float32", tensor_parallel_size=2, rank=rank) for rank in (1, 0)
    )
    with pytest.raises(ValueError, match="full take"):
        rank_layout(make_layout(small, 1 << 24), large)


@given(total=st.integers(1, 5000), size=st.integers(1, 16))
def test_columns_are_cut_evenly(total: int, size: int) -> None:
    parts = [width_share(total, rank, size) for rank in range(size)]
    assert spans(parts) == list(range(total))
    if total >= size:
        widths = [part.stop - part.start for part in parts]
        assert min(widths) > 0
        assert max(widths) <= max(total / size + 1, 1.25 * total / size)


def test_nine_heads() -> None:
    architecture = read_architecture(CONFIGS["llama-3-8b"] | NINE_HEADS)

    def queries(size: int) -> list[int]:
        return [head_share(architecture, 0, rank, size).num_queries for rank in range(size)]

    assert [queries(size) for size in (2, 3, 4, 5, 9)] == [[6, 3], [3, 3, 3], [3, 3, 2, 1], [3, 2, 1, 2, 1], [1] * 9]
    with pytest.raises(ConfigError, match=r"tensor-parallel-size is 10; this llama model has 9 query heads.*at most 9"):
        check_size(architecture, 10)
    lines = rank_lines(rank_shares(architecture, 2))
    assert lines[0].startswith("rank 0 of 2: query heads 0-5 of 9, KV heads 0-1 of 3; inner columns 0-511 of 1,024;")
    assert lines[1].startswith("rank 1 of 2: query heads 6-8 of 9, KV heads 2 of 3;")
    assert "each of 3 KV heads (on 1 or 2 ranks)" in replicated_parts(architecture, 5)


@pytest.mark.parametrize(
    ("name", "changes", "size", "what"),
    [
        ("gpt-oss-20b", {}, 64, "query heads"),
        ("deepseek-v4-flash", {}, 8, "output groups of heads"),
        ("lfm2-1.2b", {"hidden_size": 48}, 3, "units of channels"),
        ("granite-4.0-h-small", {}, 32, "query heads"),
        ("granite-4.0-h-small", {"mamba_n_heads": 16, "mamba_d_head": 512}, 16, "heads in Mamba-2 layers"),
        ("llama-3-8b", {"vocab_size": 5}, 5, "tokens in its vocabulary"),
        ("llama-3-8b", {"intermediate_size": 7}, 7, "inner columns"),
        ("gpt-oss-20b", {"intermediate_size": 3}, 3, "inner columns of an expert"),
    ],
)
def test_the_largest_number_of_ranks_says_what_limits_it(
    name: str, changes: dict[str, object], size: int, what: str
) -> None:
    limit = largest_size(read_architecture(CONFIGS[name] | changes))
    assert (limit.size, limit.what) == (size, what)


def test_plans_say_what_each_rank_holds_and_where_the_latent_cache_is() -> None:
    plan = plan_from_config(CONFIGS["deepseek-v4-flash"], memory_bytes=1 << 34, tensor_parallel_size=3)
    assert [len(plan.ranks), plan.ranks[2].rank, plan.ranks[2].heads[0].kv_heads] == [3, 2, None]
    assert any("latent KV cache" in part for part in plan.replicated)
    assert rank_shares(LLAMA, 1)[0].vocabulary == (0, LLAMA.vocab_size)


SIZES = st.lists(st.integers(1, 400 * 256), min_size=1, max_size=4)


def layout_of(sizes: list[int], pool: int) -> ArenaLayout:
    spec = GroupSpec(name="full", kind=GroupKind.FULL, layers=(), block_size=1)
    return make_layout([GroupLayout(spec=spec, block_bytes=size, stride_bytes=0, layers=()) for size in sizes], pool)


@settings(max_examples=60)
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
    formats: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": dtype}
    groups = cache_groups(read_architecture(CONFIGS[name]), block_size=16, tensor_parallel_size=ranks, **formats)
    for pool_gib in (1, 3, 6, 10, 13, 16, 20, 27, 40, 55, 80, 141)[:: num_examples(daily=4, exhaustive=1)]:
        layout = make_layout(groups, pool_gib * 2**30)
        waste = max(group_waste(layout, index) for index in range(len(groups)))
        assert layout.num_pages < 1000 or waste < 0.02
        # Sizes of which none is a multiple of another: a state of Jamba is 61.25 full blocks, and a page holds 61.
        is_odd = "deepseek" in name or "jamba" in name or ranks == 3
        assert waste < 0.005 or is_odd or pool_gib < 3 or dtype != "bfloat16"


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
