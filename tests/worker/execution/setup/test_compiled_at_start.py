"""No request waits for a compiler: what it runs was compiled, and loaded, when the engine started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.matrices import some_daily
from transom_core.contract import HeavyPolicy, KvPolicy, WindowPolicy
from transom_core.settings.settings import Settings
from transom_kernels.cpu import kernel as compiled
from transom_worker.bench.policies.policy_runs import make_request, run_together
from transom_worker.engine.startup import build_engine

POLICIES: dict[str, KvPolicy | None] = {
    "full": None,
    "window": WindowPolicy(sinks=4, window=40),
    "heavy": HeavyPolicy(sinks=4, budget=80),
}


@pytest.mark.parametrize("kv_cache_dtype", some_daily(["auto", "int8"], daily=["auto"]))
def test_requests_load_no_kernel_that_the_start_has_not(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    compiled.cpu_kernel.cache_clear()  # as in a new process: what is used from now on is loaded again
    loaded: list[str] = []
    cached_code = compiled._cached_code

    def noted(kernel: compiled.CpuKernel) -> Any:
        loaded.append(kernel.name)
        return cached_code(kernel)

    monkeypatch.setattr(compiled, "_cached_code", noted)
    given = {"model": str(tiny_model), "device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": "8MiB"}
    engine = build_engine(Settings.parse(**given, kv_cache_dtype=kv_cache_dtype, max_num_seqs=4).engine_config())
    try:
        assert loaded
        loaded.clear()
        for policy in POLICIES.values():
            request = make_request(range(5, 200), policy, max_tokens=4, prompt_logprobs=1)
            run_together(engine, [request])
            run_together(engine, [make_request(range(5, 200), policy, max_tokens=4) for _ in range(3)])
            if policy is not None:
                run_together(engine, [replace(make_request(range(5, 99), policy, max_tokens=20), kv_quality=True)])
        assert loaded == []
    finally:
        engine.shutdown()
