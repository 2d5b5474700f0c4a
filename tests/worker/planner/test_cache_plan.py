"""A plan's figures: against published ones, and against counting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.planner.model_configs import CONFIGS
from transom_core.errors import ConfigError
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import GroupLayout
from transom_core.kv_cache.retention import Retention
from transom_worker.planner import plan_cache, plan_from_config
from transom_worker.planner.concurrency import peak_demands

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "more", "theirs"),
    [
        ("gpt-oss-20b", {}, 12.54),
        ("gemma-3-27b", {}, 2.81),
        ("gemma-4-31b-like", {"max_model_len": 131_072}, 2.35),
        ("llama-4-scout", {"tensor_parallel_size": 8}, 6.37),
        ("deepseek-v4-flash", {"kv_cache_dtype": "fp8_ds_mla"}, 5.75),
        ("deepseek-v4-flash", {}, 3.60),
    ],
)
def test_at_least_as_many_requests_as_in_vllm(name: str, more: dict[str, object], theirs: float) -> None:
    plan = plan_from_config(CONFIGS[name], memory_bytes=40 * GIB, **more)  # type: ignore[arg-type]
    assert plan.concurrency[-1].requests_with_budget >= int(theirs)


KINDS = st.sampled_from(
    [
        dict(kind=GroupKind.FULL),
        dict(kind=GroupKind.WINDOW, window=9),
        dict(kind=GroupKind.SINKS_WINDOW, window=20, sinks=5),
        dict(kind=GroupKind.CHUNK, chunk=24),
        dict(kind=GroupKind.CHUNK, chunk=13),
        dict(kind=GroupKind.COMPRESSOR_STATE, ratio=16, overlap=1),
    ]
)


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    length=st.integers(2, 300),
    pages=st.integers(4, 400),
)
def test_requests_are_counted_page_by_page(
    kinds: list[dict[str, object]], sizes: list[int], length: int, pages: int
) -> None:
    """Brute force: at every token, this many requests' blocks of each group in whole pages."""
    groups = [
        GroupLayout(
            spec=GroupSpec(name=str(index), layers=(0,), block_size=4, **kind),  # type: ignore[arg-type]
            block_bytes=size * 256,
            stride_bytes=0,
            layers=(),
        )
        for index, (kind, size) in enumerate(zip(kinds, sizes, strict=False))
    ]
    plan = plan_cache(
        groups,
        memory_bytes=pages * 256 * max(sizes),
        block_size=4,
        max_model_len=length,
        max_num_batched_tokens=64,
    )
    layout = plan.layout
    retentions = [Retention(group.spec) for group in layout.groups]
    held = {tuple(retention.allocated_blocks(n) for retention in retentions) for n in range(max(1, length - 1))}

    def fit(count: int) -> bool:
        room = [layout.blocks_per_page(index) for index in range(len(groups))]
        return all(
            sum(-(-count * blocks // per_page) for blocks, per_page in zip(demand, room, strict=True))
            <= layout.num_pages
            for demand in held
        )

    requests = plan.concurrency[-1].requests
    assert fit(requests)
    assert not fit(requests + 1)
    assert plan.concurrency[-1].requests_with_budget <= requests
    assert [group.peak_blocks for group in plan.groups] == [max(blocks) for blocks in zip(*held, strict=True)]
    assert set(peak_demands([Retention(group.spec) for group in layout.groups], length, block_size=4, lag=0)) <= held


def test_lengths_climb_to_the_models() -> None:
    plan = plan_from_config(CONFIGS["llama-3-70b"], memory_bytes=GIB, max_model_len=5000)
    assert [point.length for point in plan.concurrency] == [1024, 4096, 5000]
    short = plan_from_config(CONFIGS["llama-3-70b"], memory_bytes=GIB, max_model_len=100)
    assert [point.length for point in short.concurrency] == [100]
    assert short.max_model_len == 100


def test_a_request_that_never_fits_is_shown_as_none() -> None:
    plan = plan_from_config(CONFIGS["llama-3-70b"], memory_bytes=GIB)
    assert plan.concurrency[-1].requests == 0
    assert plan.concurrency[0].requests == 3


def test_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model reaches 8192 tokens"):
        plan_from_config(CONFIGS["llama-3-8b"], memory_bytes=GIB, max_model_len=8193)
