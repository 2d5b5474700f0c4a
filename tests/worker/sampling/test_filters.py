"""The filters of the sampler in torch against plain numpy."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.how_many import num_examples
from transom_kernels.sample.reference import kept


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


@settings(max_examples=num_examples(daily=60, exhaustive=1_000), deadline=None)
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
