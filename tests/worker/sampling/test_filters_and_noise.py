"""The filters of the sampler in torch against plain numpy, and its noise: golden bits, statistics, independence of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.how_many import num_examples
from transom_kernels.sample.reference import GOLDEN, MIX_1, MIX_2, gumbel, kept, random_bits
from transom_worker.sampling.sequence_state import MASK_64, choice_key, position_keys


def kept_by_numpy(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Straight from the definitions, in float64; equal logits stay together."""
    alive = np.ones(len(logits), dtype=bool)
    if top_k > 0:
        alive &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    weights = np.where(alive, np.exp(logits.astype(np.float64) - logits.max()), 0.0)
    probabilities = weights / weights.sum()
    if top_p < 1.0:
        order = np.sort(probabilities)[::-1]
        before = np.cumsum(order) - order
        alive &= probabilities >= order[before < top_p].min()
    return set(np.flatnonzero(alive & (probabilities >= min_p * probabilities.max())).tolist())


def kept_ids(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    return set(kept(logits, top_k, top_p, min_p).nonzero().flatten().tolist())


ROW = st.tuples(
    st.sampled_from([0, 1, 2, 7, 50, 10_000]),
    st.sampled_from([1.0, 0.999, 0.95, 0.7, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@settings(max_examples=num_examples(daily=60, exhaustive=1_000))
@given(row=ROW, seed=st.integers(0, 2**16), scale=st.sampled_from([0.1, 1.0, 6.0]), banned=st.sampled_from([0.0, 0.9]))
def test_every_row_equals_numpy(row: tuple[int, float, float], seed: int, scale: float, banned: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(301, generator=generator) * scale
    logits[1:].masked_fill_(torch.rand(300, generator=generator) < banned, -torch.inf)
    assert kept_ids(logits, *row) == kept_by_numpy(logits.numpy(), *row)


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert kept_ids(logits, 1, 1.0, 0.0) == {1, 2, 3}
    assert kept_ids(logits, 0, 0.1, 0.0) == {1, 2, 3}


def test_a_nucleus_deep_in_the_tail_is_found() -> None:
    """A nearly flat row: every token is rare."""
    logits = torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 0.1
    found = kept_ids(logits, 0, 0.9, 0.0)
    assert len(found ^ kept_by_numpy(logits.numpy(), 0, 0.9, 0.0)) <= 2  # float32 sums at the edge
    assert len(found) > 20_000


INT64 = st.integers(-(2**63), 2**63 - 1)


def noise_key(seed: int, choice_index: int, output_position: int) -> int:
    return int(position_keys([choice_key(seed, choice_index)], [output_position])[0])


def splitmix(value: int) -> int:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * MIX_1) & MASK_64
    value = ((value ^ (value >> 27)) * MIX_2) & MASK_64
    return value ^ (value >> 31)


@given(key=INT64, token=st.integers(0, 300_000))
def test_bits_equal_the_arithmetic_of_python(key: int, token: int) -> None:
    bits = random_bits(torch.tensor([key]), torch.tensor([token]))
    assert int(bits) & MASK_64 == splitmix(key + token * GOLDEN)


def test_golden_values_never_change() -> None:
    assert noise_key(0, 0, 0) == GOLDEN_KEYS[0]
    assert noise_key(2**64 - 1, 3, 77) == GOLDEN_KEYS[1]
    assert noise_key(-1, 3, 77) == GOLDEN_KEYS[1]
    key = torch.tensor([noise_key(42, 1, 5)])
    assert gumbel(key, torch.tensor([0, 1, 49151])).tolist() == pytest.approx(GOLDEN_GUMBELS, rel=1e-14)


@pytest.mark.parametrize("changed", ["seed", "choice", "position"])
def test_each_input_gives_other_noise(changed: str) -> None:
    inputs = {"seed": 5, "choice": 2, "position": 11}
    rows = []
    for value in range(400):
        inputs[changed] = value
        rows.append(noise_key(inputs["seed"], inputs["choice"], inputs["position"]))
    values = gumbel(torch.tensor(rows)[:, None], torch.arange(400)).numpy()
    assert len(np.unique(values)) == values.size
    for axis in (0, 1):  # neither neighbouring rows nor neighbouring ids are correlated
        shifted = np.corrcoef(np.roll(values, 1, axis=axis).ravel(), values.ravel())[0, 1]
        assert abs(shifted) < 5 / math.sqrt(values.size)


@pytest.mark.parametrize("first", [0, 60])
def test_frequencies_inside_and_across_blocks_follow_the_softmax(first: int) -> None:
    """Ids of one block (0-5) or of two (60-65) win as often as they should."""
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.12, 0.06, 0.02], dtype=torch.float64)
    keys = torch.from_numpy(position_keys([choice_key(9, 0)] * 40_000, range(40_000)))[:, None]
    scores = probabilities.log() + gumbel(keys, torch.arange(first, first + 6))
    observed = torch.bincount(scores.argmax(-1), minlength=6).double()
    expected = probabilities * 40_000
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom, p = 0.001


GOLDEN_KEYS = [2558736989570252433, -161830220905080709]
GOLDEN_GUMBELS = [2.858882910773496, -0.8496035332363193, 3.5428065818552246]
