"""The sampling kernel against its reference and the worker's own sampler, in the interpreter (or on a GPU)."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from tests.kernels.test_sample_cpu import KINDS, Kernel, SampleTests, all_kinds, check_sample, params_of, some_rows
from tests.matrices import some_daily
from transom_kernels.sample import gpu
from transom_kernels.sample.gpu import best_of_slice_triton, sample_triton
from transom_kernels.sample.op import sample
from transom_kernels.sample.reference import best_of_slice_reference, sample_reference

pytestmark = pytest.mark.usefixtures("memory_full_of_nan")


@pytest.fixture
def kernel() -> Kernel:
    return sample_triton


class TestSample(SampleTests):
    """All of `SampleTests`."""


@pytest.mark.parametrize(
    "vocabulary",
    some_daily([1, 63, 64, 65, 1000, 2047, 2048, 2049, 2112, 4097, 9_000, 128_256], daily=[1, 63, 64, 65, 2049, 9_000]),
)
def test_all_kinds_of_rows_in_one_batch(vocabulary: int) -> None:
    """Also more ids than are listed at a time (4,096), in more than one chunk (2,048 ids each); the last block is not full."""
    check_sample(sample_triton, torch.randn(len(KINDS), vocabulary) * 2.5, all_kinds())


def test_lists_that_are_too_short_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that may win come in several lists; the top k that are too many to compare are found by search."""
    monkeypatch.setattr(gpu, "READ_BLOCKS", 8)
    monkeypatch.setattr(gpu, "ROUND_BLOCKS", 2)
    monkeypatch.setattr(gpu, "LISTED_IDS", 256)
    monkeypatch.setattr(gpu, "COMPARED_IDS", 16)
    for scale in (0.0, 2.0):
        check_sample(sample_triton, torch.randn(len(KINDS), 1000) * scale, all_kinds())


@pytest.mark.parametrize("highs", [16, 17, 129])
def test_as_many_candidates_as_are_compared_and_one_more(highs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are so near to each other that all reach the floor: 16 are compared, 17 searched in their list, 129 in the row."""
    monkeypatch.setattr(gpu, "ROUND_BLOCKS", 2)
    monkeypatch.setattr(gpu, "LISTED_IDS", 256)
    monkeypatch.setattr(gpu, "COMPARED_IDS", 16)
    ids = torch.arange(highs) * (8 if highs > 17 else 64)
    logits = torch.full((2, 1100), -1.0)
    logits[:, ids] = 10.0 + torch.rand(2, highs) * 0.05
    check_sample(sample_triton, logits, params_of(2, top_k=15))
    check_sample(sample_triton, logits, params_of(2, top_k=15, top_p=0.5))


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, params = torch.randn(len(KINDS), 700) * 3, all_kinds()
    for row, token in enumerate(sample_triton(logits.clone(), params).tolist()):
        alone = some_rows(params, slice(row, row + 1))
        assert sample_triton(logits[row : row + 1].clone(), alone).tolist() == [token]


@settings(max_examples=num_examples(daily=8, exhaustive=15))
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
    params = params_of(2, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p, first_key=seed)
    check_sample(sample_triton, logits, params)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="in float32"):
        sample(torch.zeros(2, 4).half(), params_of(2))
    with pytest.raises(ValueError, match="temperature has shape"):
        sample(torch.zeros(3, 4), params_of(2))
    with pytest.raises(ValueError, match="2 apart"):
        sample(torch.zeros(4, 2).T, params_of(2))


@pytest.mark.parametrize(
    ("first_id", "num_ids"), [(0, 1), (0, 64), (37, 63), (1, 1023), (64, 1024), (100, 1025), (2000, 2500)]
)
def test_the_best_of_a_slice(first_id: int, num_ids: int) -> None:
    """Slices begin and end anywhere in a block of noise; the best score of all slices is that of the sampled id."""
    temperature = torch.tensor([0.0, 0.7, 1.0, 0.0, 1.0, 1.0])
    params = replace(params_of(6), temperature=temperature)
    logits = torch.randn(6, first_id + num_ids) * 3
    logits[3:5, :] = 1.0  # equal logits: the lowest id, and noise alone
    logits[5] = -torch.inf
    parts = [part for part in (slice(0, first_id), slice(first_id, None)) if logits[0, part].numel()]
    found = [best_of_slice_triton(logits[:, part], temperature, params.keys, part.start) for part in parts]
    for part, (scores, ids) in zip(parts, found, strict=True):
        expected_scores, expected = best_of_slice_reference(logits[:, part], temperature, params.keys, part.start)
        assert ids.tolist() == expected.tolist()
        torch.testing.assert_close(scores, expected_scores)
    winner = torch.stack([scores for scores, _ in found]).max(0, keepdim=True).indices
    best = torch.stack([ids for _, ids in found]).gather(0, winner)[0]
    assert best.tolist() == sample_reference(logits.clone(), params).tolist()
