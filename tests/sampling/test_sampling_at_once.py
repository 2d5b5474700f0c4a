"""The sampler by Triton's kernels chooses what it chooses by torch's operators: all kinds of rows in one batch, step after step."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from test_sampler import KINDS, VOCABULARY, add, run

from transom_kernels.launch import INTERPRETED, prefer
from transom_worker.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")


def test_every_kind_of_row_draws_the_same() -> None:
    wanted = run(list(KINDS), steps=12)
    with prefer("interpreted"):
        got = run(list(KINDS), steps=12)
    assert got == wanted


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5])
def test_parameters_of_any_number_of_rows(num_rows: int) -> None:
    kinds, logits = list(KINDS)[-num_rows:], torch.randn(num_rows, VOCABULARY) * 3
    sampler, mask = Sampler(eos_token_ids=(3,)), bytes(range(1, 1 + num_rows * -(-VOCABULARY // 8)))
    for row, kind in enumerate(kinds):
        add(sampler, row, [1, 2, 3, 4], 2, KINDS[kind])
    kept = logits.clone()
    wanted = sampler.sample(logits, list(range(num_rows)), mask)
    with prefer("interpreted"):
        assert sampler.sample(logits, list(range(num_rows)), mask) == wanted
    assert logits.equal(kept)
