"""Declares a kernel's arguments once, both for the launcher, which fills them in, and for the kernel, which reads them.

A declaration is a NamedTuple. The launcher fills it by name and passes it as a list of 64-bit *words*. The kernel reads a word by
its *number*, its index in that list:

    class NormArguments(NamedTuple):
        x: torch.Tensor  # [rows, N]
        x_row: int  # bytes from a row to the next
        eps: float

    launch(kernel, num_rows, NormArguments(x=x, x_row=4 * x.stride(0), eps=1e-6))     # in the launcher

    AT = numbers_of(NormArguments)  # AT.x is 0, AT.x_row is 1, AT.eps is 2            in the kernel's module
    x = argument(arguments, AT.x) + row * argument(arguments, AT.x_row)               in the kernel

A field may itself be a declaration, such as a cache with its strides; its words then stand at the field's position. Kernels with
common code share a declaration and append words of their own:

    launch(kernel, num_rows, (Shared(x=x, ...), Own(y=y)))         OWN = numbers_of(Own, after=Shared)

The numbers of words are constants in the compiled code.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch

from transom_kernels.cpu.recording import Argument

Arguments = Sequence["Argument | Arguments"]  # a filled declaration, or a plain list of words

T = TypeVar("T")


class RowArguments(NamedTuple):
    """A tensor, and the bytes from one of its rows to the next. `work.row_address` computes a row's address."""

    tensor: torch.Tensor | None
    stride: int

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> RowArguments:
        """Return the words of a tensor; zeros if it is None."""
        return cls(tensor, 0 if tensor is None else tensor.stride(0) * tensor.element_size())


def numbers_of(declaration: type[T], *, after: type | None = None) -> T:
    """Return the declaration, each field filled with the number of its word; numbers begin after the words of `after`."""
    _, first = (None, 0) if after is None else _numbered(after, 0)
    numbers, _ = _numbered(declaration, first)
    return numbers


def _numbered(declaration: type[T], first: int) -> tuple[T, int]:
    """Return the declaration filled with numbers from `first` on, and the number after the last one."""
    numbers: list[Any] = []
    for kind in get_type_hints(declaration).values():
        if isinstance(kind, type) and issubclass(kind, tuple):
            inner, first = _numbered(kind, first)
            numbers.append(inner)
        else:
            numbers.append(first)
            first += 1
    return declaration(*numbers), first


def words_of(arguments: Arguments) -> tuple[list[int], list[torch.Tensor]]:
    """Return the arguments as words, and the tensors among them. A tensor's word is its address, a float's its float32 bits."""
    words: list[int] = []
    tensors: list[torch.Tensor] = []
    _add_words(arguments, words, tensors)
    return words, tensors


def _add_words(arguments: Arguments, words: list[int], tensors: list[torch.Tensor]) -> None:
    for argument in arguments:
        if type(argument) is int:  # first, since most arguments are integers; a bool is not one here
            words.append(argument)
        elif argument is None:
            words.append(0)
        elif isinstance(argument, tuple):
            _add_words(argument, words, tensors)
        elif isinstance(argument, torch.Tensor):
            words.append(argument.data_ptr())
            tensors.append(argument)
        elif isinstance(argument, float):
            words.append(float_bits(argument))
        else:
            words.append(int(cast(bool, argument)))


def float_bits(number: float) -> int:
    """Return the bits of a float32 as an argument word."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


class CacheArguments(NamedTuple):
    """A KV cache [ids, P, KVH, elements of a row], or the scales [ids, P, KVH] of one: ids of blocks of P tokens, KVH KV heads.

    Strides are in bytes.
    """

    cache: torch.Tensor | None
    block: int
    token: int
    head: int

    @classmethod
    def of(cls, cache: torch.Tensor | None) -> CacheArguments:
        """Return the words of a tensor; zeros if it is None."""
        if cache is None:
            return cls(None, 0, 0, 0)
        size = cache.element_size()
        block, token, head = cache.stride()[:3]
        return cls(cache, block * size, token * size, head * size)
