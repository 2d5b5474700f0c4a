"""Paged attention in Triton against the reference, in the interpreter (or on a GPU where there is one)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.how_many import num_examples
from tests.kernels.paged_case import TOLERANCE, Case, Sequence, Shape, make_case
from tests.kernels.test_quantised_kv import FORMATS_BY_NAME, quantised
from tests.matrices import matrix
from transom_kernels.launch import INTERPRETED
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.paged_attention.triton import launches, tuning, work_items
from transom_kernels.paged_attention.triton.launcher import paged_attention_triton
from transom_kernels.paged_attention.triton.work_items import ITEM_FIELDS, WorkPlan, plan_work

SMALL = Shape(size=16, block_size=8)
ONE_HEAD = replace(SMALL, heads=3, kv_heads=1)  # the interpreter takes twice as long for two


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few dozen keys make several splits."""
    monkeypatch.setattr(work_items, "WHOLE_UNITS", 2)
    monkeypatch.setattr(work_items, "LEAST_HALF_UNITS", 2)
    monkeypatch.setattr(tuning, "SPLIT_UNIT_BYTES", 1024)


def check(case: Case, *, twice: bool = not INTERPRETED, **options: Any) -> torch.Tensor:
    """`twice`: and the same bits again, as on a GPU always."""
    inputs = case.inputs(scale=case.q.shape[-1] ** -0.5, **options)
    expected = paged_attention_reference(inputs)
    out = paged_attention_triton(inputs)
    if twice:  # from what the first call left in scratch
        assert torch.equal(out, paged_attention_triton(inputs))
    limit = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=limit, rtol=limit)
    return out


@pytest.mark.parametrize("lengths", [[1, 7, 8, 9, 31, 32], [33, 64, 65, 96, 600]], ids=["whole", "split"])
def test_decode_at_the_edges_of_blocks_rounds_and_splits(lengths: list[int]) -> None:
    sequences = [Sequence(start=length - 1, count=1) for length in lengths]
    for sinks in ([float("-inf"), -50.0, 0.0], [90.0, 1.0, 20.0]):
        check(make_case(sequences, ONE_HEAD), sink_logits=torch.tensor(sinks))


@pytest.mark.parametrize(
    ("start", "dtype", "counts"),
    [(0, torch.float16, [1, 4, 5, 41, 42, 43, 85]), (13, torch.float32, [1, 4, 5, 6, 10, 11])],
    ids=str,
)
def test_prompts_at_the_edges_of_tiles(start: int, dtype: torch.dtype, counts: list[int]) -> None:
    """Of three query heads a tile has 42 tokens, of float32 5; up to 4 are no prompt."""
    sizes = {"element_bytes": dtype.itemsize, "cache_bytes": dtype.itemsize}
    found = tuning.tilings(group=3, kv_heads=2, key_size=16, multiprocessors=132, **sizes)
    assert [tiling.tile_tokens for tiling in found] == [1, 4, counts[-1] // 2]
    sequences = [Sequence(start=start, count=count) for count in counts]
    check(make_case([*sequences, Sequence(start=0, count=0), Sequence(start=3, count=1)], replace(SMALL, dtype=dtype)))


@pytest.mark.parametrize("count", [2, 5, 9])
def test_prompts_after_a_prefix_at_the_edges_of_splits(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile and two. Cut into launches with few partial results each, they give the same bits."""
    ends = [32, 33, 47, 48, 49, 63, 64, 65, 160]
    case = make_case([Sequence(start=max(0, end - count), count=count) for end in ends], ONE_HEAD)
    whole = check(case, sink_logits=torch.tensor([-1.0, 0.0, 9.0]))
    (key,) = launches.launch_keys_of(case.batch)
    assert any(launch.num_combine_items for launch in launches.launches_of(case.batch, key, case.q.device))
    monkeypatch.setattr(launches, "MAX_PARTIAL_BYTES", 4 * 3 * 18 * 50)  # 50 partial results of three heads
    case.batch.scratch.clear()
    again = paged_attention_triton(case.inputs(scale=0.25, sink_logits=torch.tensor([-1.0, 0.0, 9.0])))
    assert torch.equal(again, whole)
    made = launches.launches_of(case.batch, key, case.q.device)
    assert all(launch.work.num_partials <= 50 for launch in made)
    assert len(made) > 1


def test_a_second_layer_computes_the_same_from_what_the_first_left() -> None:
    """Tokens of all kinds, with splits and without: programs stay in the batch's scratch."""
    sequences = [Sequence(start=70, count=1), Sequence(start=2, count=1), Sequence(start=60, count=3)]
    case = make_case([*sequences, Sequence(start=30, count=9)], replace(SMALL, num_sink_blocks=1))
    check(case, twice=True, window=40, num_sink_tokens=3)
    check(case, twice=True)  # a layer of another mask


def test_work_in_a_larger_shape_is_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([Sequence(start=70, count=1), Sequence(start=0, count=1), Sequence(start=40, count=2)], SMALL)
    right = check(case)

    def plan_longer(*arguments: Any) -> WorkPlan:
        plan = plan_work(*arguments)
        items = np.full((len(plan.items) + 3, ITEM_FIELDS), 77, dtype=np.int32)
        combine_items = np.full((len(plan.combine_items) + 2, 4), 77, dtype=np.int32)
        with pytest.raises(ValueError, match="do not fit arrays of 1 and"):
            plan.write(items[:1], combine_items)
        plan.write(items, combine_items)
        return WorkPlan(items=items, combine_items=combine_items, num_partials=9)

    monkeypatch.setattr(launches, "plan_work", plan_longer)
    case.batch.scratch.clear()
    assert check(case).equal(right)


@pytest.mark.parametrize(("window", "sinks"), matrix([1, 7, 8, 9, 33], [0, 5, 8], strength=1))
def test_windows_and_sink_tokens_whose_run_has_slid(window: int, sinks: int) -> None:
    shape = replace(ONE_HEAD, num_sink_blocks=-(-sinks // 8))
    long, chunk = max(0, 70 - window + 1), max(0, 50 - window + 1)
    sequences = [Sequence(start=70, count=1, first_key=long), Sequence(start=50, count=20, first_key=chunk)]
    check(
        make_case([*sequences, Sequence(start=2, count=1), Sequence(start=0, count=9)], shape),
        window=window,
        num_sink_tokens=sinks,
    )


@pytest.mark.parametrize("chunk", [8, 16, 17])
def test_chunks_and_lower_bounds(chunk: int) -> None:
    sequences = [Sequence(start=63, count=1), Sequence(start=64, count=1), Sequence(start=40, count=30, attend_from=50)]
    check(make_case([*sequences, Sequence(start=20, count=2, attend_from=30)], ONE_HEAD), chunk=chunk, window=40)


@pytest.mark.parametrize(
    ("widths", "counts", "dtype"),
    matrix(
        [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)],
        [(3, 1), (1, 1), (9, 3), (5, 1), (7, 7)],
        [torch.float32, torch.float16, torch.bfloat16],
        strength=1,
    ),
)
def test_widths_and_head_counts(widths: tuple[int, int], counts: tuple[int, int], dtype: torch.dtype) -> None:
    shape = Shape(heads=counts[0], kv_heads=counts[1], size=widths[0], v_size=widths[1], block_size=16, dtype=dtype)
    check(make_case([Sequence(start=40, count=1), Sequence(start=11, count=7)], shape), soft_cap=2.0)


def test_a_result_does_not_depend_on_the_rest_of_the_batch() -> None:
    sequences = [Sequence(start=70, count=1), Sequence(start=140, count=1), Sequence(start=90, count=3)]
    many = make_case([*sequences, Sequence(start=50, count=2), Sequence(start=10, count=16)], ONE_HEAD)
    whole = check(many)
    batch = many.batch
    names = ("block_table", "first_block", "attend_from", "first_block_host", "attend_from_host", "start_host")
    for b in range(len(batch.count_host)):
        rows = slice(sum(batch.count_host[:b]), sum(batch.count_host[: b + 1]))
        own = {name: getattr(batch, name)[b : b + 1] for name in (*names, "count_host")}
        alone = replace(many, q=many.q[rows], batch=replace(batch, **own, scratch={}))
        assert torch.equal(paged_attention_triton(alone.inputs(scale=0.25)), whole[rows])


@pytest.mark.parametrize(
    ("name", "size", "dtype"), matrix(list(FORMATS_BY_NAME), [16, 80], [torch.float32, torch.bfloat16])
)
def test_quantised_caches(name: str, size: int, dtype: torch.dtype) -> None:
    """Decoding whole and split, prompts, windows, sinks, over poisoned slots; a head of 80 is two tiles."""
    sequences = [Sequence(start=70, count=1), Sequence(start=3, count=1), Sequence(start=9, count=7)]
    shape = Shape(heads=3, kv_heads=1, size=size, v_size=size - 4, block_size=8, dtype=dtype)
    case = make_case([*sequences, Sequence(start=40, count=2, attend_from=30)], shape)
    caches = quantised(case, FORMATS_BY_NAME[name], head_major=size == 16)
    options: dict[str, Any] = {"window": 40, "num_sink_tokens": 5, "soft_cap": 3.0} if size == 16 else {}
    check(case, sink_logits=torch.randn(3), **caches.arguments, **options)


sequences = st.lists(
    st.tuples(st.integers(0, 70), st.integers(0, 12), st.integers(0, 80)).map(
        lambda t: Sequence(start=t[0], count=t[1], attend_from=t[2])
    ),
    min_size=1,
    max_size=4,
).filter(lambda found: any(s.count for s in found))


@given(
    sequences,
    st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3)]),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([16, 20]),
    st.one_of(st.none(), st.integers(1, 80)),
    st.integers(0, 6),
    st.one_of(st.none(), st.integers(4, 40)),
    st.booleans(),
)
@settings(
    max_examples=num_examples(daily=6, exhaustive=40), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_anything(
    found: list[Sequence],
    heads: tuple[int, int],
    block: int,
    size: int,
    window: int | None,
    sinks: int,
    chunk: int | None,
    cap: bool,
) -> None:
    shape = Shape(heads=heads[0], kv_heads=heads[1], size=size, block_size=block)
    options: dict[str, Any] = dict(window=window, num_sink_tokens=sinks, chunk=chunk, soft_cap=2.0 if cap else None)
    check(make_case(found, shape), **options, sink_logits=torch.linspace(-1, 1, heads[0]) if cap else None)
