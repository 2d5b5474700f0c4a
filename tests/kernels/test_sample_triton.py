"""The sampling kernel against its reference and the worker's own sampler, in the interpreter (or on a GPU)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from tests.matrices import matrix, some_daily
from transom_core.contract import SamplingParams
from transom_kernels.sample import gpu
from transom_kernels.sample.gpu import sample_triton
from transom_kernels.sample.op import sample
from transom_kernels.sample.params import SampleParams
from transom_kernels.sample.reference import gumbel, sample_reference
from transom_worker.sampling import noise
from transom_worker.sampling.sampler import Sampler

MANY = 10**6  # more than any vocabulary here
KINDS = (  # temperature, top_k, top_p, min_p of rows in one batch
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 1, 1.0, 0.0), (0.7, 7, 1.0, 0.0), (1.3, 40, 0.9, 0.0), (0.9, MANY, 0.8, 0.0),
    (1.0, 0, 0.6, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 0, 1 - 1e-7, 0.0), (0.8, 0, 1.0, 0.1), (1.1, 0, 0.7, 0.3), (1.0, 30, 0.95, 0.02),
)  # fmt: skip


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN, or of the largest integer: what is read must have been written."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def all_kinds() -> SampleParams:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*KINDS, strict=True))
    return SampleParams(
        temperature=temperature, top_k=top_k.int(), top_p=top_p, min_p=min_p, keys=params_of(len(KINDS)).keys
    )  # fmt: skip


def params_of(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_key: int = 7,
    **changes: torch.Tensor,
) -> SampleParams:
    return SampleParams(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        keys=torch.arange(first_key, first_key + rows) * 0x123456789ABCDEF,
        **changes,
    )


def check(logits: torch.Tensor, params: SampleParams) -> None:
    wanted = sample_reference(logits.clone(), params)
    assert sample_triton(logits.clone(), params).tolist() == wanted.tolist()


def test_noise_is_the_samplers_own() -> None:
    keys, ids = torch.tensor([-5, 3, 2**62]), torch.arange(130)
    wanted = noise.gumbel(keys[:, None], ids[None, :])
    got = torch.tensor([[gumbel(int(key), int(token)) for token in ids] for key in keys], dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("vocabulary", "temperature"),
    matrix([1, 63, 64, 65, 1000, 2047, 2048, 2049, 4097], [0.0, 0.7, 1.0], strength=1),
)
def test_greedy_and_noise_alone(vocabulary: int, temperature: float) -> None:
    check(torch.randn(2, vocabulary) * 3, params_of(2, temperature=temperature))


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_k": 5}, {"top_k": 400}, {"top_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.2},
                {"top_k": 20, "top_p": 0.5, "min_p": 0.05, "temperature": 1.5}], ids=str,
)  # fmt: skip
def test_filters(filters: dict[str, float]) -> None:
    check(torch.randn(5, 200) * 2, params_of(5, **filters))  # type: ignore[arg-type]


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0, -0.0, 0.0]] * 30)
    for filters in ({"top_k": 2}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.95}):
        check(logits[:4], params_of(4, **filters))
    drawn = sample_triton(logits.clone(), params_of(30, top_k=2))
    assert set(drawn.tolist()) == {0, 1, 2, 3}


def test_of_equal_scores_the_lowest_id() -> None:
    assert sample_triton(torch.zeros(1, 5000), params_of(1, temperature=0.0)).tolist() == [0]


def test_changes_come_first() -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0], [0.5, 0.25, 0.0]])
    changes: dict[str, Any] = {
        "change_row": torch.tensor([0, 0, 1]), "change_id": torch.tensor([1, 2, 0]),
        "change_factor": torch.tensor([4.0, 2.0, 1.0]), "change_minus": torch.tensor([0.0, 1.0, 0.4]),
    }  # fmt: skip
    mine, theirs = logits.clone(), logits.clone()
    params = params_of(2, temperature=0.0, **changes)
    assert sample_triton(mine, params).tolist() == sample_reference(theirs, params).tolist() == [0, 1]
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(mine, torch.tensor([[1.0, 0.5, -7.0], [0.1, 0.25, 0.0]]))


@pytest.mark.parametrize("vocabulary", some_daily([1, 63, 64, 65, 1000, 2112, 4097], daily=[1, 63, 65, 4097]))
def test_all_kinds_of_rows_in_one_batch(vocabulary: int) -> None:
    check(torch.randn(len(KINDS), vocabulary) * 3, all_kinds())


@pytest.mark.parametrize("vocabulary", some_daily([9_000, 32_000], daily=[9_000]))
def test_a_large_vocabulary(vocabulary: int) -> None:
    """More ids than are listed at a time (4,096), in more than one chunk (2,048 ids each); the last block is not full."""
    check(torch.randn(len(KINDS), vocabulary) * 2.5, all_kinds())


@pytest.mark.exhaustive
def test_a_vocabulary_of_128k() -> None:
    params = all_kinds()
    rows = torch.tensor([1, 4, 6])  # noise alone, top-k with top-p, top-p alone
    few = replace(
        params, **{name: getattr(params, name)[rows] for name in ("temperature", "top_k", "top_p", "min_p", "keys")}
    )
    check(torch.randn(3, 128_256) * 3, few)


@pytest.mark.parametrize(
    "name",
    ["flat", "two levels", "whole numbers", "a peak", "mostly forbidden", "forbidden blocks", "all but one forbidden"],
)
def test_rows_of_special_shape(name: str) -> None:
    shape = (len(KINDS), 1500)
    logits = {
        "flat": torch.full(shape, -3.5),
        "two levels": torch.randint(0, 2, shape) * 2.0,
        "whole numbers": (torch.randn(shape) * 2).round(),
        "a peak": torch.zeros(shape).index_fill(1, torch.tensor([777]), 40.0),
        "mostly forbidden": torch.randn(shape).masked_fill(torch.rand(shape) < 0.99, -math.inf),
        "forbidden blocks": torch.randn(shape).index_fill(1, torch.arange(64, 1472), -math.inf),
        "all but one forbidden": torch.full(shape, -math.inf).index_fill(1, torch.tensor([1100]), -7.0),
    }[name]
    check(logits, all_kinds())


def test_everything_forbidden_still_gives_a_token() -> None:
    assert sample_triton(torch.full((len(KINDS), 200), -math.inf), all_kinds()).tolist() == [0] * len(KINDS)


@pytest.mark.parametrize(("top_k", "top_p"), matrix([1, 2, 199, 200, 201], [1.0, 0.5], strength=1))
def test_top_k_up_to_the_vocabulary_and_over_it(top_k: int, top_p: float) -> None:
    check(torch.randn(2, 200) * 2, params_of(2, top_k=top_k, top_p=top_p))


@pytest.mark.parametrize("top_p", [1e-30, 0.02, 0.3, 0.999, 1 - 1e-7])
def test_winners_outside_the_nucleus_are_passed_over(top_p: float) -> None:
    check(torch.randn(5, 130) * 0.5, params_of(5, top_p=top_p))


def test_lists_that_are_too_short_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that may win come in several lists; the top k that are too many to compare are found by search."""
    monkeypatch.setattr(gpu, "READ_BLOCKS", 8)
    monkeypatch.setattr(gpu, "ROUND_BLOCKS", 2)
    monkeypatch.setattr(gpu, "LISTED_IDS", 256)
    monkeypatch.setattr(gpu, "COMPARED_IDS", 16)
    for scale in (0.0, 0.1, 2.0):
        check(torch.randn(len(KINDS), 1000) * scale, all_kinds())


@pytest.mark.parametrize("highs", [16, 17, 129])
def test_as_many_candidates_as_are_compared_and_one_more(highs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are so near to each other that all reach the floor: 16 are compared, 17 searched in their list, 129 in the row."""
    monkeypatch.setattr(gpu, "ROUND_BLOCKS", 2)
    monkeypatch.setattr(gpu, "LISTED_IDS", 256)
    monkeypatch.setattr(gpu, "COMPARED_IDS", 16)
    ids = torch.arange(highs) * (8 if highs > 17 else 64)
    logits = torch.full((2, 1100), -1.0)
    logits[:, ids] = 10.0 + torch.rand(2, highs) * 0.05
    check(logits, params_of(2, top_k=15))
    check(logits, params_of(2, top_k=15, top_p=0.5))


def test_numbers_that_are_none_neither_hang_nor_reach_other_rows() -> None:
    logits, params = torch.randn(len(KINDS), 150), all_kinds()
    wanted = sample_reference(logits, params)
    for first, share in ((0, 0.3), (1, 1.0)):
        broken = logits.clone()
        broken[first::2].masked_fill_(torch.rand(len(KINDS) // 2, 150) < share, math.nan)
        got = sample_triton(broken, params)
        assert ((got >= 0) & (got < 150)).all()
        assert got[1 - first :: 2].equal(wanted[1 - first :: 2])


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, params = torch.randn(len(KINDS), 700) * 3, all_kinds()
    together = sample_triton(logits.clone(), params).tolist()
    for row, token in enumerate(together):
        names = ("temperature", "top_k", "top_p", "min_p", "keys")
        alone = SampleParams(**{name: getattr(params, name)[row : row + 1] for name in names})
        assert sample_triton(logits[row : row + 1].clone(), alone).tolist() == [token]


def test_rows_with_space_between_them() -> None:
    logits, params = torch.randn(len(KINDS), 300)[:, :257], all_kinds()
    assert sample_triton(logits, params).tolist() == sample_reference(logits, params).tolist()


@settings(max_examples=num_examples(daily=8, exhaustive=15), deadline=None)
@given(
    st.integers(1, 3000), st.sampled_from([0.0, 1e-5, 0.3, 1.0, 40.0, 1e12]), st.sampled_from([0, 1, 4, 60, 1000]),
    st.sampled_from([1.0, 0.05, 0.7, 0.99]), st.sampled_from([0.0, 0.01, 0.5]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_any_row(
    vocabulary: int, scale: float, top_k: int, top_p: float, min_p: float, forbids: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocabulary, generator=generator) * scale
    if forbids:
        logits[:, 1:].masked_fill_(torch.rand(2, vocabulary - 1, generator=generator) < 0.7, -math.inf)
    check(logits, params_of(2, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p, first_key=seed))


@settings(max_examples=num_examples(daily=10, exhaustive=25), deadline=None)
@given(
    st.integers(1, 150), st.sampled_from([0, 1, 3, 50]), st.sampled_from([1.0, 0.3, 0.9]), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_as_the_workers_sampler(
    vocabulary: int, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    sampler, keys = Sampler(), []
    for row in range(2):
        wanted = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sampler.add(row, token_ids=(0,), num_prompt_tokens=1, params=wanted, seed=seed + row)
        keys.append(noise.noise_key(seed + row, 0, 0))
    params = SampleParams(
        temperature=torch.full((2,), temperature), top_k=torch.full((2,), top_k, dtype=torch.int32),
        top_p=torch.full((2,), top_p), min_p=torch.full((2,), min_p), keys=torch.tensor(keys),
    )  # fmt: skip
    assert sample_triton(logits.clone(), params).tolist() == sampler.sample(logits, [0, 1]).token_ids


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="in float32"):
        sample(torch.zeros(2, 4).half(), params_of(2))
    with pytest.raises(ValueError, match="temperature has shape"):
        sample(torch.zeros(3, 4), params_of(2))
    with pytest.raises(ValueError, match="2 apart"):
        sample(torch.zeros(4, 2).T, params_of(2))
