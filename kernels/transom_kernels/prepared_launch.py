"""Launches Triton kernels with little host time: everything that does not change from step to step is prepared once.

Triton's own launch, `kernel[grid](...)`, inspects every argument each time: it binds names, checks whether numbers and pointers
are multiples of 16, makes a string of the options, and uses all of that as the compiled kernel's key. A `PreparedLaunch` keeps a
layer's numbers and constants, so that only pointers are inspected. The first launch goes through Triton, which compiles; later
launches with the same dtypes pass their addresses to the compiled kernel directly.

A launch still goes through Triton in four cases: in Triton's interpreter; if an address is not a multiple of 16, as the compiled
kernel expects; while a profiler listens to launches; and if Triton is not one of `VERSIONS`, since compiled kernels of other
versions may take other arguments.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import attrgetter, or_
from typing import Any, TypeVar

import torch
import triton
from triton import knobs
from triton.runtime import JITFunction, driver

VERSIONS = ("3.6.", "3.7.")
T = TypeVar("T")
ALIGNMENT = 16  # bytes: Triton compiles pointers to multiples of this to faster loads
_address, _dtype = torch.Tensor.data_ptr, attrgetter("dtype")


class PreparedLaunch:
    """A kernel with its constant arguments. Its parameters must be pointers, then numbers that change each step, then constants."""

    def __init__(self, kernel: Any, arguments: Mapping[str, Any], **options: int) -> None:
        """`arguments` has by name every parameter that is the same at each launch; `options` are Triton's, such as `num_warps`."""
        self._kernel, self._keywords = kernel, {**arguments, **options}
        self._last = tuple(arguments[name] for name in kernel.arg_names if name in arguments)
        self._is_compiled = isinstance(kernel, JITFunction) and triton.__version__.startswith(VERSIONS)
        # (device, *dtypes) -> (launcher, function, metadata)
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._recent: tuple[
            Any, ...
        ] = ()  # the last launch's device and list of dtypes, and what `_compiled` has for them

    def __call__(self, grid: tuple[int, int, int], pointers: tuple[torch.Tensor, ...], *numbers: int) -> None:
        """Launch on the current stream. The kernel must list `numbers` in `do_not_specialize`; they are below 2 ** 31."""
        addresses = [*map(_address, pointers)]
        is_aligned = reduce(or_, addresses) % ALIGNMENT == 0  # of all addresses at once
        is_plain = self._is_compiled and is_aligned and not knobs.runtime.launch_enter_hook.calls
        if is_plain and self._compiled:
            active, dtypes = driver.active, [*map(_dtype, pointers)]
            device = active.get_current_device()
            if self._recent[:2] != (device, dtypes):
                self._recent = (device, dtypes, self._compiled.get((device, *dtypes)))
            if (found := self._recent[2]) is not None:
                run, function, metadata = found
                stream = active.get_current_stream(device)
                run(*grid, stream, function, metadata, None, None, None, *addresses, *numbers, *self._last)
                return
        made = self._kernel[grid](*pointers, *numbers, **self._keywords)
        if is_plain and made is not None:
            key = (driver.active.get_current_device(), *map(_dtype, pointers))
            self._compiled[key], self._recent = (made.run, made.function, made.packed_metadata), ()


def kept(prepared: dict[Any, Any] | None, key: Any, make: Callable[..., T], *arguments: Any) -> T:
    """Return `prepared[key]`, which the first call sets to `make(*arguments)`; without a dict every call makes it."""
    if prepared is None:
        return make(*arguments)
    found: T | None = prepared.get(key)
    if found is None:
        found = prepared[key] = make(*arguments)
    return found
