"""The CPU sampling kernel against its reference, at odd sizes; its noise; checked, and for other processors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.kernels.sample_case import Kernel, SampleTests, check_sample, sample_cpu
from transom_kernels.sample.cpu import sample_records
from transom_kernels.sample.reference import SampleParams, gumbel
from transom_kernels.sample.table import Adjustments, SampleTable

ROWS = 24
NO_INTS, NO_FLOATS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(5)


@pytest.fixture
def kernel() -> Kernel:
    return sample_cpu


class TestSample(SampleTests):
    """All of `SampleTests`."""


def some(share: float, values: torch.Tensor, otherwise: float) -> torch.Tensor:
    return torch.where(torch.rand(len(values)) < share, values, otherwise)


def random_params(rows: int, vocabulary: int) -> SampleParams:
    """Greedy rows, and rows with any mix of filters."""
    return SampleParams(
        temperature=some(0.8, torch.rand(rows) * 2 + 0.05, 0.0),
        top_k=some(0.5, torch.randint(1, min(2 * vocabulary, 500) + 1, (rows,)), 0).int(),
        top_p=some(0.5, torch.rand(rows) * 0.98 + 0.01, 1.0),
        min_p=some(0.4, torch.rand(rows) * 0.3, 0.0),
        keys=torch.randint(-(2**62), 2**62, (rows,)),
    )


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 63, 64, 65, 1000, 8191, 8192, 8193, 16_400])
def test_mixes_of_parameters(vocabulary: int) -> None:
    logits = torch.randn(ROWS, vocabulary) * 4
    check_sample(sample_cpu, logits, random_params(ROWS, vocabulary))
    check_sample(sample_cpu, logits.round(), random_params(ROWS, vocabulary))
    logits[torch.rand(logits.shape) < 0.5] = -math.inf
    logits[:, -1] = 0.0
    check_sample(sample_cpu, logits, random_params(ROWS, vocabulary))


def greedy(logits: torch.Tensor) -> list[int]:
    table = SampleTable()
    number = table.add(key=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    found: list[int] = sample_records(logits, table, torch.full((len(logits),), number)).tolist()
    return found


def test_greedy_takes_what_torch_takes() -> None:
    logits = torch.randn(5, 20_001).mul_(20).round_()
    assert greedy(logits) == logits.argmax(-1).tolist()
    logits[1, 9000], logits[1, 15_000], logits[2, :], logits[3, 20_000] = math.nan, math.nan, -math.inf, math.inf
    assert greedy(logits) == logits.numpy().argmax(-1).tolist()


def test_noise_is_the_samplers_own() -> None:
    """With one finite logit, a row's score is that logit plus the id's noise."""
    ids = torch.randint(0, 10_000, (500,))
    logits = torch.full((500, 10_000), -math.inf)
    logits[torch.arange(500), ids] = 0.0
    keys = torch.randint(-(2**62), 2**62, (500,))
    table = SampleTable()
    numbers = [table.add(key=key, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for key in keys.tolist()]
    scores = torch.empty(500, dtype=torch.float64)
    assert sample_records(logits, table, torch.tensor(numbers), scores=scores).tolist() == ids.tolist()
    torch.testing.assert_close(scores, gumbel(keys, ids), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("first_id", [5, 64, 8000, 9000])
def test_slices_of_a_vocabulary_find_the_sample_of_the_whole(first_id: int) -> None:
    logits = torch.randn(8, 20_000)
    table = SampleTable()
    numbers = torch.tensor(
        [table.add(key=9 * row, temperature=row / 4, top_k=0, top_p=1.0, min_p=0.0) for row in range(8)]
    )
    whole = sample_records(logits, table, numbers)
    parts, scores = [], torch.empty(2, 8, dtype=torch.float64)
    for index, (begin, end) in enumerate([(0, first_id), (first_id, 20_000)]):
        parts.append(sample_records(logits[:, begin:end], table, numbers, first_id=begin, scores=scores[index]))
    assert torch.equal(torch.where(scores[1] > scores[0], parts[1], parts[0]), whole)


def test_adjustments() -> None:
    table, vocabulary = SampleTable(), 9001
    ids, counts = np.array([3, 8999, 77, 8191, 8192, 50]), np.array([0, 2, 1, 5, 3, 9])
    number = table.add(
        key=1, position=2, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
        adjustments=Adjustments(
            bias_ids=np.array([1, 9000, 10**6]), bias_values=np.array([0.5, -0.25, 9.0], dtype=np.float32),
            banned_ids=np.array([2, 8500, 10**6]), min_tokens=3, repetition=1.5, presence=0.5, frequency=0.125,
        ),
    )  # fmt: skip
    table.set_counts(number, ids, counts, 5)  # the last one is not in use yet
    logits = torch.randn(40, vocabulary) * 0.1
    for row, token in enumerate([1, 2, 3, 50, 77, 8191, 8192, 8500, 8999, 9000]):
        logits[row, token] += 0.7  # so that what happens to this id decides
    changed = logits.clone()
    changed[:, 1] += 0.5
    changed[:, 9000] -= 0.25
    changed[:, [2, 8500]] = -math.inf
    penalised = torch.tensor(ids[:5])
    values = changed[:, penalised]
    values = torch.where(values < 0, values * 1.5, values / 1.5)
    changed[:, penalised] = values - (torch.tensor(counts[:5]) > 0) * 0.5 - torch.tensor(counts[:5]) * 0.125
    numbers = torch.full((40,), number)
    assert sample_records(logits, table, numbers).tolist() == changed.argmax(-1).tolist()
    allowed = torch.randint(0, 256, (40, -(-vocabulary // 8)), dtype=torch.uint8)
    bits = np.unpackbits(allowed.numpy(), axis=1, count=vocabulary, bitorder="little")
    changed[torch.from_numpy(bits == 0)] = -math.inf
    assert sample_records(logits, table, numbers, allowed=allowed).tolist() == changed.argmax(-1).tolist()
    table.set_position(number, 3)  # long enough: nothing is banned
    logits[:, 2] = 5.0
    assert sample_records(logits, table, numbers).tolist() == [2] * 40


def small_case() -> None:
    torch.manual_seed(0)
    for vocabulary in (77, 8200):
        check_sample(sample_cpu, torch.randn(ROWS, vocabulary) * 3, random_params(ROWS, vocabulary))
    test_adjustments()
    test_slices_of_a_vocabulary_find_the_sample_of_the_whole(100)
