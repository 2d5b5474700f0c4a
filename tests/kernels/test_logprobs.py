"""Log-probabilities: the CPU kernel against torch, at odd sizes, with equal logits and with logits of -inf."""

from __future__ import annotations

import math

import pytest
import torch

from tests.matrices import matrix
from transom_kernels.logprobs import RowLogprobs, logprobs
from transom_kernels.logprobs.op import logprobs_reference

ROWS = 6


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(5)


def check(logits: torch.Tensor, num_top: int) -> RowLogprobs:
    chosen = torch.randint(0, logits.shape[1], (len(logits),))
    got = logprobs(logits, chosen, num_top)
    _, values, ranks = logprobs_reference(logits, chosen, min(num_top, logits.shape[1]))
    assert torch.equal(got.ranks, ranks)
    torch.testing.assert_close(got.logprobs, values, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.logprobs, logits.log_softmax(-1).gather(1, got.ids), rtol=1e-5, atol=2e-6)
    assert all(len(set(row[1:])) == len(row) - 1 for row in got.ids.tolist())
    return got


@pytest.mark.parametrize(
    ("vocabulary", "num_top"),
    matrix([1, 15, 16, 17, 64, 65, 1000, 8191, 8192, 8193, 16_500], [0, 1, 5, 20], strength=1),
)
def test_against_torch(vocabulary: int, num_top: int) -> None:
    logits = torch.randn(ROWS, vocabulary) * 4
    got = check(logits, num_top)
    assert torch.equal(got.ids[:, 1:], logits.topk(min(num_top, vocabulary)).indices)
    logits[torch.rand(logits.shape) < 0.7] = -math.inf
    logits[:, 0] = 1.0
    check(logits, num_top)


def test_equal_logits_are_listed_by_id_and_share_a_rank() -> None:
    logits = torch.randn(ROWS, 3000).round()
    got = check(logits, 20)
    for row, values in zip(got.ids.tolist(), logits, strict=True):
        assert row[1:] == sorted(range(3000), key=lambda token: (-float(values[token]), token))[:20]


def test_strided_rows() -> None:
    wide = torch.full((ROWS, 1200), math.nan)
    wide[:, :1001] = torch.randn(ROWS, 1001)
    check(wide[:, :1001], 3)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="chosen"):
        logprobs(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64), 1)


def small_case() -> None:
    torch.manual_seed(0)
    check(torch.randn(ROWS, 8200), 5)
