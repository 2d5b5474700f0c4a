"""Rows to sample from, and the tests that the CPU and the Triton kernel share.

A test module inherits `SampleTests` and gives the fixture `kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from transom_kernels.sample.cpu import sample_records
from transom_kernels.sample.reference import SampleParams, sample_reference
from transom_kernels.sample.table import SampleTable

MANY = 10**6  # more than any vocabulary here
KINDS = (  # temperature, top_k, top_p, min_p of rows in one batch
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 1, 1.0, 0.0), (0.7, 7, 1.0, 0.0), (1.3, 40, 0.9, 0.0), (0.9, MANY, 0.8, 0.0),
    (1.0, 0, 0.6, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 0, 1 - 1e-7, 0.0), (0.8, 0, 1.0, 0.1), (1.1, 0, 0.7, 0.3), (1.0, 30, 0.95, 0.02),
)  # fmt: skip
COLUMNS = ("temperature", "top_k", "top_p", "min_p", "keys")
SHAPE = (len(KINDS), 1500)
LOGITS: dict[str, Callable[[], torch.Tensor]] = {
    "flat": lambda: torch.full(SHAPE, -3.5),
    "two levels": lambda: torch.randint(0, 2, SHAPE) * 2.0,
    "whole numbers": lambda: (torch.randn(SHAPE) * 2).round(),
    "a peak": lambda: torch.zeros(SHAPE).index_fill(1, torch.tensor([777]), 40.0),
    "mostly forbidden": lambda: torch.randn(SHAPE).masked_fill(torch.rand(SHAPE) < 0.99, -math.inf),
    "forbidden blocks": lambda: torch.randn(SHAPE).index_fill(1, torch.arange(64, 1472), -math.inf),
    "all but one forbidden": lambda: torch.full(SHAPE, -math.inf).index_fill(1, torch.tensor([1100]), -7.0),
}
Kernel = Callable[[torch.Tensor, SampleParams], torch.Tensor]


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


def some_rows(params: SampleParams, rows: slice | torch.Tensor) -> SampleParams:
    return SampleParams(**{name: getattr(params, name)[rows] for name in COLUMNS})


def sample_cpu(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """The CPU kernel, as the operator is called: with a record for each row."""
    table = SampleTable()
    columns = [getattr(params, name).tolist() for name in COLUMNS]
    numbers = [table.add(**dict(zip((*COLUMNS[:4], "key"), row, strict=True))) for row in zip(*columns, strict=True)]
    return sample_records(logits, table, torch.tensor(numbers, dtype=torch.int64))


def check_sample(kernel: Kernel, logits: torch.Tensor, params: SampleParams) -> None:
    wanted = sample_reference(logits.clone(), params)
    assert kernel(logits.clone(), params).tolist() == wanted.tolist()


class SampleTests:
    """All kinds of parameters in one batch, over rows of any shape."""

    @pytest.mark.parametrize("name", LOGITS)
    def test_rows_of_special_shape(self, kernel: Kernel, name: str) -> None:
        check_sample(kernel, LOGITS[name](), all_kinds())

    def test_equal_logits_stay_or_go_together_and_the_lowest_id_wins(self, kernel: Kernel) -> None:
        logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0, -0.0, 0.0]] * 30)
        for filters in ({"top_k": 2}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.95}):
            check_sample(kernel, logits[:4], params_of(4, **filters))
        assert set(kernel(logits.clone(), params_of(30, top_k=2)).tolist()) == {0, 1, 2, 3}
        assert kernel(torch.zeros(1, 9000), params_of(1, temperature=0.0)).tolist() == [0]

    def test_numbers_that_are_none_reach_no_other_row_and_every_row_gets_an_id(self, kernel: Kernel) -> None:
        logits, params = torch.randn(len(KINDS), 150), all_kinds()
        wanted = sample_reference(logits, params)
        for value, first, share in ((math.nan, 0, 0.3), (math.nan, 1, 1.0), (-math.inf, 0, 1.0)):
            broken = logits.clone()
            broken[first::2].masked_fill_(torch.rand(len(KINDS) // 2, 150) < share, value)
            got = kernel(broken, params)
            assert ((got >= 0) & (got < 150)).all()
            assert got[1 - first :: 2].equal(wanted[1 - first :: 2])

    def test_rows_with_space_between_them(self, kernel: Kernel) -> None:
        wide = torch.full((len(KINDS), 300), math.nan)
        wide[:, :257] = torch.randn(len(KINDS), 257)
        assert kernel(wide[:, :257], all_kinds()).tolist() == sample_reference(wide[:, :257], all_kinds()).tolist()
