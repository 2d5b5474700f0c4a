"""A rank that compiles its kernels reports progress."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from transom_kernels.cpu.kernel import CpuKernel, statistics
from transom_kernels.launch import has_triton
from transom_worker.execution.setup import load_progress
from transom_worker.execution.setup.load_progress import compile_progress


def test_every_compiled_kernel_is_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A rank that compiles for longer than the executor waits for a sign of life gives one with each kernel."""
    monkeypatch.setattr(load_progress, "PERIOD_S", 0.0)
    monkeypatch.setattr(load_progress, "LOG_PERIOD_S", 0.0)
    monkeypatch.setenv("TRANSOM_CACHE_DIR", str(tmp_path))  # nothing is compiled yet
    told: list[int] = []
    with caplog.at_level("INFO", "transom.worker"), compile_progress(told.append):
        assert CpuKernel("tests.kernels.double_kernel", "make_double", ()).address
        assert told == [1]
        if has_triton():
            knobs = import_module("triton").knobs
            knobs.runtime.jit_post_compile_hook(key="k", fn=None)
            assert told == [1, 2]
    assert "1 kernels compiled in" in caplog.text
    assert statistics.on_compiled is None
