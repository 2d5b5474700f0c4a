"""Gumbel-max sampling that draws little noise, against Gumbel-max sampling that draws all of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_worker.sampling.gumbel_max import gumbel_argmax
from transom_worker.sampling.noise import BLOCK, block_minimum, gumbel, noise_key


def keys(num_rows: int, seed: int) -> torch.Tensor:
    return torch.tensor([noise_key(seed, 0, row) for row in range(num_rows)])[:, None]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 6),
    vocab_size=st.sampled_from([1, 5, 63, 64, 65, 500, 3000]),
    scale=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    banned=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_winner_equals_that_of_all_the_noise(
    seed: int, num_rows: int, vocab_size: int, scale: float, banned: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
    logits.masked_fill_(torch.rand(logits.shape, generator=generator) < banned, -torch.inf)
    scores = logits + gumbel(keys(num_rows, seed), torch.arange(vocab_size))
    best = scores.max(-1)
    found_scores, found_ids = gumbel_argmax(logits, keys(num_rows, seed))
    assert found_ids.tolist() == best.indices.tolist()
    assert torch.equal(found_scores, best.values)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), first=st.integers(0, 300), width=st.integers(1, 300))
def test_a_slice_has_the_scores_of_the_whole_vocabulary(seed: int, first: int, width: int) -> None:
    logits = torch.randn(4, first + width, generator=torch.Generator().manual_seed(seed)) * 3
    scores = (logits + gumbel(keys(4, seed), torch.arange(first + width)))[:, first:].max(-1)
    found_scores, found_ids = gumbel_argmax(logits[:, first:], keys(4, seed), first_id=first)
    assert torch.equal(found_ids, scores.indices + first)
    assert torch.equal(found_scores, scores.values)


def test_a_block_minimum_is_the_least_of_its_ids() -> None:
    noise = gumbel(keys(50, 1), torch.arange(10 * BLOCK)).view(50, 10, BLOCK)
    minimum, place = block_minimum(keys(50, 1), torch.arange(10))
    assert torch.equal(noise.argmax(-1), place)
    torch.testing.assert_close(noise.amax(-1), -minimum.log())
    counts = torch.bincount(place.ravel(), minlength=BLOCK).double()
    expected = place.numel() / BLOCK
    assert ((counts - expected) ** 2 / expected).sum() < 103.4  # chi-square, 63 degrees of freedom, p = 0.001


@pytest.mark.parametrize("first", [0, 60])
def test_frequencies_inside_and_across_blocks_follow_the_softmax(first: int) -> None:
    """Ids of one block (0-4) or of two (60-64 and on) win as often as they should."""
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.12, 0.06, 0.02], dtype=torch.float64)
    scores = probabilities.log() + gumbel(keys(40_000, 9), torch.arange(first, first + 6))
    observed = torch.bincount(scores.argmax(-1), minlength=6).double()
    expected = probabilities * 40_000
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom, p = 0.001
