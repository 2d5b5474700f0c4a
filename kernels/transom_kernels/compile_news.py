"""Calls a listener after each kernel that is compiled, or that Triton loads from its cache: a first start compiles for minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transom_kernels.launch import has_cpu_kernels, has_triton


@contextmanager
def compile_news(on_compiled: Callable[[], None]) -> Iterator[None]:
    """Within this context, call `on_compiled` on the compiling thread after each compiled kernel, of Triton or for CPUs."""
    _tell(on_compiled)
    try:
        yield
    finally:
        _tell(None)


def _tell(on_compiled: Callable[[], None] | None) -> None:
    if has_triton():
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = None if on_compiled is None else lambda **_: on_compiled()
    if has_cpu_kernels():
        from transom_kernels.cpu.kernel import statistics

        statistics.on_compiled = on_compiled
