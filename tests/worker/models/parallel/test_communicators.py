"""Sums, gathers and broadcasts of both communicators, between processes."""

import hashlib
import itertools
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.matrices import some_daily
from tests.worker.models.parallel.rank_processes import KINDS, outcomes
from transom_worker.models.parallel.communicator import Communicator
from transom_worker.models.parallel.rank_memory import BUFFER_BYTES
from transom_worker.models.parallel.shared_memory import SMALL_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SHAPES = ((), (0,), (1,), (576,), (3, 5, 7), (64, 576), (SMALL_BYTES // 2 + 7,), (BUFFER_BYTES // 4 + 1,))
SIZES = (2, 3)


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + sum(shape))
    if dtype == torch.int64:
        return torch.randint(-(2**61), 2**61, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def in_order(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = tensor(0, shape, dtype)
    for rank in range(1, size):
        total = total + tensor(rank, shape, dtype)
    return total


def sums(comm: Communicator, rank: int, pipe: Connection) -> dict[Any, tuple[str, torch.Tensor]]:
    """Each sum's digest and its first elements."""
    found = {}
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        total = comm.all_reduce_(tensor(rank, shape, dtype))
        assert total.shape == shape
        found[shape, dtype] = digest(total), total.flatten()[:5000].clone()
    return found


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("kind", "size"), some_daily(itertools.product(KINDS, SIZES), daily=[("memory", 3), ("gloo", 2)])
)
def test_sums_are_the_same_bits_on_every_rank(kind: str, size: int) -> None:
    first, *others = outcomes(kind, size, sums)
    for (shape, dtype), (bits, beginning) in first.items():
        assert all(other[shape, dtype][0] == bits for other in others)
        expected = in_order(size, shape, dtype)
        torch.testing.assert_close(beginning, expected.flatten()[:5000], rtol=0.02, atol=0.05)
        if kind == "memory" or dtype == torch.int64:
            assert bits == digest(expected)


def strided(comm: Communicator, rank: int, pipe: Connection) -> list[torch.Tensor]:
    whole = tensor(rank, (6, 8), torch.float32)
    before = whole.clone()
    comm.all_reduce_(whole[:, 1::3])
    assert torch.equal(whole[:, 0::3], before[:, 0::3])
    passed_on = tensor(rank, (6, 8), torch.float32)
    comm.broadcast_(passed_on.T)
    gathered = comm.gather(tensor(rank, (4, 6), torch.float32).T)
    return [whole[:, 1::3].clone(), passed_on, *(gathered or [])]


@pytest.mark.parametrize("kind", KINDS)
def test_strided_tensors(kind: str) -> None:
    first, second = outcomes(kind, 2, strided)
    expected = in_order(2, (6, 8), torch.float32)[:, 1::3]
    assert torch.equal(first[0], expected)
    assert torch.equal(second[0], expected)
    assert torch.equal(second[1], tensor(0, (6, 8), torch.float32))
    assert all(torch.equal(part, tensor(rank, (4, 6), torch.float32).T) for rank, part in enumerate(first[2:]))


WIDTHS = (([5, 3, 4], 2), ([0, 3, 1], 1), ([100_000, 70_001, 1], 7))  # of each rank; rows


def gathers(comm: Communicator, rank: int, pipe: Connection) -> list[list[torch.Tensor] | None]:
    return [comm.gather(tensor(rank, (rows, widths[rank]), torch.float32)) for widths, rows in WIDTHS]


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_widths_may_differ(kind: str) -> None:
    first, *others = outcomes(kind, 3, gathers)
    assert others == [[None] * len(WIDTHS)] * 2
    for (widths, rows), parts in zip(WIDTHS, first, strict=True):
        for rank, part in enumerate(parts):
            assert torch.equal(part, tensor(rank, (rows, widths[rank]), torch.float32))


def mixture(comm: Communicator, rank: int, pipe: Connection) -> bool:
    """Hundreds of operations of random kinds and sizes, ranks in and out of step; each rank knows what must come out."""
    choices = torch.Generator().manual_seed(5)
    dawdling = torch.Generator().manual_seed(rank)
    for step in range(300):
        what, width = torch.randint(0, 4, (2,), generator=choices).tolist()
        length = int(torch.randint(1, 3000, (1,), generator=choices))
        values = [torch.full((length,), float(step * 3 + peer)) for peer in range(3)]
        if torch.rand((), generator=dawdling) < 0.1:
            torch.randn(20_000)
        if what <= 1:
            assert torch.equal(comm.all_reduce_(values[rank].clone()), sum(values, start=torch.zeros(length)))
        elif what == 2:
            assert torch.equal(comm.broadcast_(values[rank].clone()), values[0])
        else:
            parts = comm.gather(values[rank][: length - width * rank] if length > 10 else values[rank])
            assert (parts is None) == (rank != 0)
            assert all(bool((part == value[0]).all()) for part, value in zip(parts or [], values, strict=False))
    return True


def test_a_mixture_out_of_step() -> None:
    assert outcomes("memory", 3, mixture) == [True] * 3


def many_shapes(comm: Communicator, rank: int, pipe: Connection) -> bool:
    for length in range(1, 700):  # more than views are kept
        assert torch.equal(comm.all_reduce_(torch.full((length,), rank + 1.0)), torch.full((length,), 3.0))
    with torch.inference_mode():
        inside = comm.all_reduce_(torch.full((3,), rank + 1.0))
        comm.all_reduce_(torch.ones(4321))
    return bool((comm.all_reduce_(torch.ones(4321)) == 2.0).all() and (inside == 3.0).all())


def test_many_shapes_in_and_out_of_inference_mode() -> None:
    assert outcomes("memory", 2, many_shapes) == [True, True]
