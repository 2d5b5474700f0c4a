"""Counter-based noise: golden bits, statistics, and independence of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_worker.sampling.noise import (
    GOLDEN,
    MASK_64,
    MIX_1,
    MIX_2,
    choice_key,
    gumbel,
    noise_key,
    position_keys,
    random_bits,
    uniform,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix(value: int) -> int:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * MIX_1) & MASK_64
    value = ((value ^ (value >> 27)) * MIX_2) & MASK_64
    return value ^ (value >> 31)


@settings(deadline=None)
@given(key=INT64, token=st.integers(0, 300_000))
def test_bits_equal_the_arithmetic_of_python(key: int, token: int) -> None:
    bits = random_bits(torch.tensor([key]), torch.tensor([token]))
    assert int(bits) & MASK_64 == splitmix(key + token * GOLDEN)


def test_golden_values_never_change() -> None:
    assert noise_key(0, 0, 0) == GOLDEN_KEYS[0]
    assert noise_key(2**64 - 1, 3, 77) == GOLDEN_KEYS[1]
    assert noise_key(-1, 3, 77) == GOLDEN_KEYS[1]
    key = torch.tensor([noise_key(42, 1, 5)])
    assert uniform(key, torch.tensor([0, 1, 49151])).tolist() == GOLDEN_UNIFORMS
    assert gumbel(key, torch.tensor([0, 1, 49151])).tolist() == pytest.approx(GOLDEN_GUMBELS, rel=1e-14)


@settings(deadline=None)
@given(rows=st.lists(st.tuples(INT64, st.integers(0, 8), st.integers(0, 2**40)), max_size=5))
def test_keys_of_many_rows_are_those_of_each(rows: list[tuple[int, int, int]]) -> None:
    together = position_keys(
        [choice_key(seed, choice) for seed, choice, _ in rows], [position for *_, position in rows]
    )
    assert together.tolist() == [noise_key(*row) for row in rows]


@settings(deadline=None)
@given(key=INT64, tokens=st.lists(st.integers(0, 2**31), min_size=1, max_size=8))
def test_uniform_is_an_odd_multiple_inside_the_open_interval(key: int, tokens: list[int]) -> None:
    values = uniform(torch.tensor([key]), torch.tensor(tokens))
    for value, bits in zip(
        values.tolist(), random_bits(torch.tensor([key]), torch.tensor(tokens)).tolist(), strict=True
    ):
        assert 0.0 < value < 1.0
        assert value * 2**53 == 2 * ((bits & MASK_64) >> 12) + 1


def test_a_candidate_has_the_same_noise_alone_and_in_a_full_row() -> None:
    keys = torch.tensor([noise_key(seed, 0, 9) for seed in range(3)])[:, None]
    full = gumbel(keys, torch.arange(5000))
    some = torch.tensor([7, 4999, 0])
    assert torch.equal(gumbel(keys[1:2], some), full[1:2, some])


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


def test_moments_of_a_gumbel() -> None:
    keys = torch.tensor([noise_key(1, 0, position) for position in range(20)])[:, None]
    values = gumbel(keys, torch.arange(10_000))
    assert values.mean().item() == pytest.approx(0.5772157, abs=5 * math.pi / math.sqrt(6 * values.numel()))
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)


GOLDEN_KEYS = [2558736989570252433, -161830220905080709]
GOLDEN_UNIFORMS = [0.9467690731246016, 0.09670533187300212, 0.9735735979078236]
GOLDEN_GUMBELS = [2.858882910773496, -0.8496035332363193, 3.5428065818552246]
