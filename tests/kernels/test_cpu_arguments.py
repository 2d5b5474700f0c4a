"""A declaration of arguments gives the launcher's words and the kernel's numbers in one order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of, words_of


class Shared(NamedTuple):
    num_rows: int
    x: RowArguments
    eps: float


class Own(NamedTuple):
    flag: bool
    y: torch.Tensor | None = None


def test_numbers_count_the_words_of_declarations_within_and_follow_those_before() -> None:
    shared, own = tuple(numbers_of(Shared)), tuple(numbers_of(Own, after=Shared))
    assert shared == (0, (1, 2), 3)
    assert own == (4, 5)


def test_each_word_is_at_its_number() -> None:
    x, y = torch.zeros(3, 4), torch.zeros(2)
    words, tensors = words_of((Shared(eps=1.0, num_rows=7, x=RowArguments.of(x[:, :2])), Own(flag=True, y=y)))
    assert words == [7, x.data_ptr(), 16, 0x3F800000, 1, y.data_ptr()]
    assert [tensor.data_ptr() for tensor in tensors] == [x.data_ptr(), y.data_ptr()]


def test_what_is_absent_is_0() -> None:
    assert words_of((RowArguments.of(None), Own(flag=False))) == ([0, 0, 0, 0], [])
