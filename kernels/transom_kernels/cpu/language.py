"""What kernels are made of: Python functions that numba translates, and functions whose LLVM code this package emits itself.

    @emits(FLOAT, FLOAT)                     # kinds of the result and of the arguments
    def sqrt(b, x):                          # b: LLVM's builder
        return b.call(function(b, "llvm.sqrt.f32", F32, [F32]), [x])

    @helper
    def length(x, y):                        # called by kernels; numba derives the kinds of its arguments
        return sqrt(x * x + y * y)

Both are only descriptions. The compiler (`compiler.py`) shows them to numba, which is not imported before something is compiled, so
a launcher may share a file with its kernel. Python cannot call them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Kind(Enum):
    """What a value is. Addresses are integers, in bytes."""

    NOTHING = auto()
    BOOL = auto()
    INT = auto()  # 64 bits
    FLOAT = auto()  # float32
    DOUBLE = auto()  # float64
    FLOATS = auto()  # a vector of 16 float32
    INTS = auto()  # a vector of 16 int32


NOTHING, BOOL, INT, FLOAT, DOUBLE, FLOATS, INTS = Kind

Kinds = Kind | tuple[Kind, ...]  # of an argument; a tuple of values of one kind


@dataclass(frozen=True, eq=False, slots=True)
class Emitted:
    """A function whose code `emit(builder, *LLVM values)` appends; it returns the LLVM value of its result, if it has one."""

    emit: Callable[..., Any]
    result: Kind
    arguments: tuple[Kinds, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Helper:
    """A Python function that kernels call. With `is_inlined` each call becomes the function's code."""

    function: Callable[..., Any]
    is_inlined: bool


def emits(result: Kind, *arguments: Kinds) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function (builder, *LLVM values) that appends code to a kernel, and returns its result's LLVM value or None."""
    return lambda emit: Emitted(emit, result, arguments)


def helper(function: Callable[..., Any]) -> Any:
    """Decorates a function that kernels call."""
    return Helper(function, is_inlined=False)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorates a `helper` that is never worth a call."""
    return Helper(function, is_inlined=True)
