"""The language of kernels: Python functions that numba translates, and functions whose LLVM code this package emits itself.

    @emits(FLOAT, FLOAT)                     # kinds of the result and of the arguments
    def sqrt(b, x):                          # b: LLVM's builder
        return b.call(function(b, "llvm.sqrt.f32", F32, [F32]), [x])

    @helper
    def length(x, y):                        # called by kernels; numba derives the kinds of its arguments
        return sqrt(x * x + y * y)

A decorator returns a description of the function (`Emitted` or `Helper`), which Python cannot call as a kernel does. The compiler
(`compiler.py`) shows descriptions to numba. Numba is imported only to compile, so a launcher may share a file with its kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class Kind(Enum):
    """The type of a value in a kernel. Addresses are INT, in bytes."""

    NOTHING = auto()
    BOOL = auto()
    INT = auto()  # 64 bits
    FLOAT = auto()  # float32
    DOUBLE = auto()  # float64
    FLOATS = auto()  # a vector of 16 float32
    INTS = auto()  # a vector of 16 int32


NOTHING, BOOL, INT, FLOAT, DOUBLE, FLOATS, INTS = Kind

Kinds = Kind | tuple[Kind, ...]  # of an argument: one value, or a tuple of values, all of one kind


@dataclass(frozen=True, eq=False, slots=True)
class Emitted:
    """A function that kernels call: `emit(builder, *LLVM values)` appends its LLVM code and returns the result's value, or None."""

    emit: Callable[..., Any]
    result: Kind
    arguments: tuple[Kinds, ...]

    def __call__(self, b: Any, *values: Any) -> Any:
        """Append the code; another function that emits code calls this."""
        return self.emit(b, *values)


@dataclass(frozen=True, eq=False, slots=True)
class Helper:
    """A Python function that kernels call. With `is_inlined` each call is replaced by the function's code."""

    function: Callable[..., Any]
    is_inlined: bool


def emits(result: Kind, *arguments: Kinds) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function (builder, *LLVM values) that appends code to a kernel and returns its result's LLVM value, or None."""
    return lambda emit: Emitted(emit, result, arguments)


def helper(function: Callable[..., Any]) -> Any:
    """Decorate a Python function that kernels call."""
    return Helper(function, is_inlined=False)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorate a `helper` that is always inlined, since it is too small for a call."""
    return Helper(function, is_inlined=True)
