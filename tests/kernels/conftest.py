"""Triton's kernels are tested in its interpreter, or on a GPU where there is one; see the conftest above."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.on_device import on_device

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


@pytest.fixture
def memory_full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN, so that what a kernel leaves out is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(float("nan")))
