"""Every decode step that a graph should serve fits into a size, and there are few sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_worker.execution.replay.decode_sizes import MAX_ITEMS, DecodeSize, DecodeSizes, StepSize

FULL = GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=16)
WINDOW = GroupSpec(name="window", kind=GroupKind.SINKS_WINDOW, layers=(1,), block_size=16, window=128, sinks=4)


def sizes(max_num_seqs: int = 64, max_model_len: int = 131_072) -> DecodeSizes:
    return DecodeSizes(
        [FULL, WINDOW], max_num_seqs=max_num_seqs, max_model_len=max_model_len, max_num_batched_tokens=1024
    )


def need(lengths: list[int], split_keys: int = 1024) -> StepSize:
    """What sequences of these lengths take, this step's token included."""
    return StepSize(
        num_seqs=len(lengths),
        num_items=sum(-(-length // split_keys) for length in lengths),
        has_combine_items=max(lengths) > split_keys,
        num_columns=(-(-max(lengths) // 16), min(10, -(-max(lengths) // 16))),
    )


def test_sequences_come_in_few_sizes() -> None:
    assert sizes(64).num_seqs == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert sizes(50).num_seqs == (1, 2, 4, 8, 16, 24, 32, 48, 50)
    assert sizes(1).num_seqs == (1,)
    assert [len(sizes(64, length).all) for length in (1024, 8192, 131_072)] == [9, 26, 39]
    assert [len(sizes(256, length).all) for length in (1024, 8192, 131_072)] == [13, 37, 55]


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([1], (0, 1)),
        ([1024], (0, 1)),
        ([1025], (1, 1)),
        ([5, 1024, 9], (0, 4)),
        ([5, 1025, 9], (1, 4)),
        ([8193], (2, 1)),
        ([131_072], (3, 1)),
        ([131_072] + [10] * 63, (3, 64)),
        ([3000] * 64, (1, 64)),
        ([9000] * 64, (2, 64)),
        ([30_000] * 64, None),
        ([10] * 65, None),
    ],
)
def test_the_smallest_size_is_taken(lengths: list[int], size: tuple[int, int] | None) -> None:
    found = sizes().smallest_for(need(lengths))
    assert found == (None if size is None else DecodeSize(level=size[0], num_seqs=size[1]))


@settings(deadline=None, max_examples=num_examples(daily=50, exhaustive=500))
@given(
    max_model_len=st.integers(1, 200_000),
    max_num_seqs=st.integers(1, 300),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=40),
)
def test_steps_with_few_work_items_always_fit_a_size(
    max_model_len: int, max_num_seqs: int, shares: list[float]
) -> None:
    made = sizes(max_num_seqs, max_model_len)
    step = need([1 + int(share * (max_model_len - 1)) for share in shares[:max_num_seqs]])
    found = made.smallest_for(step)
    added = min(num for num in made.num_seqs if num >= step.num_seqs) - step.num_seqs
    if step.num_items + added <= MAX_ITEMS:
        assert found in made.all
        assert made.num_items(found) >= step.num_items + added
        assert not step.has_combine_items or made.num_combine_items(found) > 0


@pytest.mark.parametrize("max_model_len", [1, 40, 1024, 1025, 5000, 131_072, 3_000_000])
def test_the_longest_sequence_of_a_size_fits_it(max_model_len: int) -> None:
    made = sizes(48, max_model_len)
    assert made.all
    for size in made.all:
        lengths = [made.longest_tokens(size)] + [min(1024, max_model_len)] * (size.num_seqs - 1)
        step = need(lengths)
        assert step.num_items <= made.num_items(size)
        assert step.num_columns[0] <= made.num_columns(size, 0)
        assert not (step.has_combine_items and size.level == 0)
        assert made.num_combine_items(size) >= step.has_combine_items
