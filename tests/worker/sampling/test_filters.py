"""Filters against plain numpy, one row at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_worker.sampling.filters import Filters, filter_logits


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


def kept(logits: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> list[set[int]]:
    candidates = filter_logits(logits.clone(), Filters(top_k=top_k, top_p=top_p, min_p=min_p))
    alive = candidates.logits_RC > -torch.inf
    for row, ids in enumerate(candidates.token_ids_RC):
        assert torch.equal(candidates.logits_RC[row][alive[row]], logits[row][ids[alive[row]]])
        assert ids[alive[row]].diff().gt(0).all()
    assert (candidates.token_ids_RC[~alive] == 0).all()
    return [set(ids[mask].tolist()) for ids, mask in zip(candidates.token_ids_RC, alive, strict=True)]


ROW = st.tuples(
    st.sampled_from([0, -1, 1, 2, 7, 50, 10_000]),
    st.sampled_from([1.0, 0.999, 0.95, 0.7, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6), seed=st.integers(0, 2**16), scale=st.sampled_from([0.1, 1.0, 6.0]))
def test_every_row_equals_numpy(rows: list[tuple[int, float, float]], seed: int, scale: float) -> None:
    logits = torch.randn(len(rows), 301, generator=torch.Generator().manual_seed(seed)) * scale
    top_k, top_p, min_p = (list(column) for column in zip(*rows, strict=True))
    expected = [kept_by_numpy(logits[i].numpy(), *row) for i, row in enumerate(rows)]
    assert kept(logits, top_k, top_p, min_p) == expected


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    assert kept(logits, [1], [1.0], [0.0]) == [{1, 2, 3}]
    assert kept(logits, [0], [0.1], [0.0]) == [{1, 2, 3}]


def test_top_p_is_taken_over_what_top_k_left() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    assert kept(logits, [0], [0.6], [0.0]) == [{0, 1}]
    assert kept(logits, [2], [0.6], [0.0]) == [{0}]  # 0.5 / 0.8 is past 0.6


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_banned_tokens_never_come_back(top_p: float) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    logits[0, 5:] = -torch.inf
    assert kept(logits, [20, 20], [top_p, top_p], [0.0, 0.0])[0] <= set(range(5))


def test_a_nucleus_deep_in_the_tail_is_found() -> None:
    """Nearly flat rows: every token is rare."""
    logits = torch.randn(2, 30_000, generator=torch.Generator().manual_seed(0)) * 0.1
    logits[1, 5] = 12.0
    expected = [kept_by_numpy(row.numpy(), 0, 0.9, 0.0) for row in logits]
    found = kept(logits, [0, 0], [0.9, 0.9], [0.0, 0.0])
    assert [len(a ^ b) <= 2 for a, b in zip(found, expected, strict=True)] == [True, True]  # float32 sums at the edge
    assert len(found[0]) > 20_000
