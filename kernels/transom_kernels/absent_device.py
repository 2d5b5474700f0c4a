"""Compiles Triton kernels ahead of time for a GPU that this machine does not have: operators run on CPU tensors, and launches only
compile.

    with absent_gpu((9, 0)):        # operators launch their GPU kernels, for the compute capability of an H100
        model = ...                 # weights get the layout that they have on a GPU
        with no_work():
            model.forward(batch)    # each kernel that is launched is compiled into Triton's cache

The key of a compiled kernel in Triton's cache is its source, the types of its arguments, which of them are multiples of 16, its
options and the compute capability. All of these are the same for CPU tensors, so a start on a GPU finds what was compiled here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transom_kernels import launch

_aten = torch.ops.aten
# operator -> function of its arguments that returns the result's shape
_PRODUCTS: dict[Any, Callable[..., tuple[int, ...]]] = {
    _aten.mm.default: lambda a, b: (a.shape[0], b.shape[1]),
    _aten.bmm.default: lambda a, b: (*a.shape[:2], b.shape[2]),
    _aten.addmm.default: lambda bias, a, b: (a.shape[0], b.shape[1]),
    _aten.baddbmm.default: lambda bias, a, b: (*a.shape[:2], b.shape[2]),
    _aten.matmul.default: lambda a, b: (*a.shape[:-1], *b.shape[-1:]),
    _aten.linear.default: lambda x, weight, bias=None: (*x.shape[:-1], weight.shape[0]),
}
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
}


class AbsentLauncher:
    """Stands in for the launcher that Triton builds to pass a launch to CUDA."""

    launch_cooperative_grid = launch_pdl = False

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        """Do nothing."""


class AbsentUtils:
    """Pretends to load kernels, for a device with the given bytes of shared memory."""

    def __init__(self, shared_bytes: int) -> None:
        # compiled code depends on none of these; Triton refuses kernels that need more shared memory
        self._properties = {
            "max_shared_mem": shared_bytes,
            "multiprocessor_count": 1,
            "max_num_regs": 65_536,
            "warpSize": 32,
        }

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the limits of a program on the device."""
        return self._properties

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Return a module, a function, registers, spilled bytes and the most threads of a program. Triton checks only the last."""
        return 0, 0, 0, 0, 1024


class AbsentDriver:
    """The driver that Triton uses for a GPU that is not there."""

    launcher_cls: type[Any] = AbsentLauncher

    def __init__(self, capability: tuple[int, int]) -> None:
        self._arch = 10 * capability[0] + capability[1]
        self.utils = AbsentUtils(launch.SHARED_BYTES[capability])

    def get_current_target(self) -> Any:
        """Return the target that kernels are compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


class _NoWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes torch's matrix products and allocations zeros, so that large models take no time and no index is out of range."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shape_of = _PRODUCTS.get(func)
        if shape_of is not None:
            # the first argument of these two is a bias
            like = args[-1] if func in (_aten.addmm.default, _aten.baddbmm.default) else args[0]
            return like.new_zeros(shape_of(*args, **(kwargs or {})))
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _ALLOCATIONS else made


@contextmanager
def no_work() -> Iterator[None]:
    """Within this context, make torch's matrix products and allocations on this thread return zeros without computing."""
    with _NoWork():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def absent_gpu(capability: tuple[int, int], on_compiled: Callable[..., None] | None = None) -> Iterator[None]:
    """Within this context, make all operators of the process launch their GPU kernels, which Triton compiles for `capability`.

    Triton calls `on_compiled` for each kernel, with `cache_hit` and other keywords.

    Raises:
        ValueError: `launch.SHARED_BYTES` lacks this compute capability, or Triton interprets kernels in this process.
    """
    if capability not in launch.SHARED_BYTES:
        known = ", ".join(f"{major}.{minor}" for major, minor in launch.SHARED_BYTES)
        raise ValueError(f"Compute capability {capability[0]}.{capability[1]} is not known; known are {known}.")
    if launch.INTERPRETED:
        raise ValueError("TRITON_INTERPRET=1 is set, so Triton would compile nothing; unset it.")
    from triton import knobs
    from triton.runtime import driver

    driver.set_active(AbsentDriver(capability))
    knobs.compilation.listener = on_compiled
    launch.pretend(capability)
    try:
        yield
    finally:
        launch.pretend(None)
        knobs.compilation.listener = None
        with suppress(RuntimeError):  # without a GPU, Triton finds no driver to go back to
            driver.reset_active()


def compiled_directory() -> Path:
    """Return the directory of Triton's cache: TRITON_CACHE_DIR, or a directory below the user's home."""
    from triton import knobs

    return Path(knobs.cache.dir)
