"""The CPU sampling kernel against its reference, at odd sizes; slices of a vocabulary; checked, and for other processors.

The Triton kernel has the tests of `SampleTests`, too: a test module inherits it and gives the fixture `kernel`.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from transom_kernels.sample.cpu import sample_records
from transom_kernels.sample.reference import SampleParams, sample_reference
from transom_kernels.sample.table import Adjustments, SampleTable

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
    assert kernel(logits.clone(), params).tolist() == sample_reference(logits.clone(), params).tolist()


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


ROWS = 24
NO_INTS, NO_FLOATS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)


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


@pytest.mark.parametrize("first_id", [5, 64, 8000, 9000])
def test_slices_of_a_vocabulary_find_the_sample_of_the_whole(first_id: int) -> None:
    logits = torch.randn(8, 20_000)
    table = SampleTable()
    rows = [table.add(key=9 * row, temperature=row / 4, top_k=0, top_p=1.0, min_p=0.0) for row in range(8)]
    numbers = torch.tensor(rows)
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
