"""Launches Triton kernels with all that does not change from step to step prepared once.

Triton's own launch, `kernel[grid](...)`, looks at every argument each time: it binds names, asks whether numbers and pointers are
multiples of 16, makes a string of the options, and looks the compiled kernel up by all of it. A `PreparedLaunch` keeps a layer's
numbers and constants, so that only pointers are looked at: the first launch goes through Triton, which compiles, and later ones
with equal dtypes give their addresses to the compiled kernel.

Every launch goes through Triton in the interpreter, for an address that is no multiple of 16 (the kernel is compiled for such),
while a profiler listens to launches, and with a Triton whose compiled kernels may take other arguments than those of `VERSIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import JITFunction, driver

VERSIONS = ("3.6.", "3.7.")
ALIGNMENT = 16  # bytes


class PreparedLaunch:
    """A kernel with its last arguments. Its parameters are pointers, numbers that change from step to step, and the others."""

    def __init__(self, kernel: Any, arguments: Mapping[str, Any], **options: int) -> None:
        """`arguments`: by name, every parameter that is the same at each launch; `options`: Triton's, as `num_warps`."""
        self._kernel, self._keywords = kernel, {**arguments, **options}
        self._last = tuple(arguments[name] for name in kernel.arg_names if name in arguments)
        self._is_compiled = isinstance(kernel, JITFunction) and triton.__version__.startswith(VERSIONS)
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}  # by device, dtypes

    def __call__(self, grid: tuple[int, int, int], pointers: tuple[torch.Tensor, ...], *numbers: int) -> None:
        """Launch on the current stream. The kernel must not specialise `numbers`, which are below 2 ** 31."""
        addresses = [tensor.data_ptr() for tensor in pointers]
        is_aligned = reduce(or_, addresses) % ALIGNMENT == 0
        is_plain = self._is_compiled and is_aligned and not knobs.runtime.launch_enter_hook.calls
        if is_plain and self._compiled:
            active = driver.active
            device = active.get_current_device()
            found = self._compiled.get((device, *[tensor.dtype for tensor in pointers]))
            if found is not None:
                run, function, metadata = found
                stream = active.get_current_stream(device)
                run(*grid, stream, function, metadata, None, None, None, *addresses, *numbers, *self._last)
                return
        made = self._kernel[grid](*pointers, *numbers, **self._keywords)
        if is_plain and made is not None:
            key = (driver.active.get_current_device(), *[tensor.dtype for tensor in pointers])
            self._compiled[key] = made.run, made.function, made.packed_metadata
