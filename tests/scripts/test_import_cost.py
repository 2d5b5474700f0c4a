"""What the import rules are for: a fresh interpreter loads a module and none of the heavy libraries that it must not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

TENSORS = {"torch", "triton", "transom_kernels", "transformers"}
SERVING = {"ray", "fastapi", "starlette", "uvicorn", "transom_cluster"}

MODULES = [
    ("transom_core.contract", TENSORS | SERVING),
    ("transom_core.text.tokenizer", TENSORS | SERVING),
    ("transom_worker.kvcache", TENSORS | SERVING),
    ("transom_worker.scheduling.scheduler", TENSORS | SERVING),
    ("transom_worker.llm", SERVING | {"transformers"}),
    ("transom_cluster.cli", TENSORS | {"ray"}),
    ("transom_cluster.http.api", TENSORS),
]


@pytest.mark.parametrize(("module", "unwanted"), MODULES, ids=[module for module, _ in MODULES])
def test_a_module_loads_no_library_that_it_must_not_need(module, unwanted):
    code = f"import sys, {module}; print(*{unwanted!r} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
