"""Triton's kernels are tested in its interpreter, or on a GPU where there is one; see the conftest above."""

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def on_device(launch: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`launch` on copies of its tensors; what it wrote into them is copied back, and what it returns comes to host memory."""

    @functools.wraps(launch)
    def launched(*args: Any, **kwargs: Any) -> Any:
        copies = _Copies(device)
        result = launch(*copies.of(args), **copies.of(kwargs))
        copies.write_back()
        return _to_host(result)

    return launched


class _Copies:
    """Whole storages are copied, once each, so that views of one slab stay views of one slab, strides and gaps included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, value: Any) -> Any:
        """The value with copies in the place of its tensors, however deep they are."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return type(value)(self.of(item) for item in value)
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            kept = {name: item if name == "scratch" else self.of(item) for name, item in fields.items()}
            return dataclasses.replace(value, **kept)
        return value

    def write_back(self) -> None:
        for host, copy in self._storages.values():
            host.copy_(copy)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        host = tensor.untyped_storage()
        if not host.nbytes():
            return tensor.to(self._device)
        if host.data_ptr() not in self._storages:
            copy = torch.UntypedStorage(host.nbytes(), device=self._device)
            copy.copy_(host)
            self._storages[host.data_ptr()] = host, copy
        _, copy = self._storages[host.data_ptr()]
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return type(value)(_to_host(item) for item in value) if isinstance(value, list | tuple) else value


# Triton has no packages for some platforms, which have no use for its kernels either.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*_triton.py", "*ahead_of_time.py"]


@pytest.fixture(scope="module", autouse=True)
def launchers_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where there is a GPU, and no interpreter, a test module's launchers take its tensors there."""
    from transom_kernels.launch import INTERPRETED

    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available() and not INTERPRETED:
            for name, value in list(vars(request.module).items()):
                if name.rstrip("_").endswith("_triton") and callable(value):
                    patch.setattr(request.module, name, on_device(value, torch.device("cuda")))
        yield


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """New tensors are full of NaN, or of the largest integer, so that what a kernel leaves out is seen."""
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    with nan_memory():
        yield
