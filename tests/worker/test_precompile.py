"""`transom compile` fills the cache of kernels: a start after it compiles nothing, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive  # it compiles every kernel of a model

SERVED = """
import logging, sys
from transom_worker.llm import LLM
from transom_core.contract import HeavyPolicy, SamplingParams, WindowPolicy
with LLM(sys.argv[1], kv_cache_memory_bytes="8MiB", device="cpu") as llm:
    params = [SamplingParams(temperature=0.0, max_tokens=5), SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=5)]
    prompts = [{"prompt_token_ids": list(range(1, 60))}] * 2
    llm.generate(prompts, params, use_tqdm=False)
    for policy in (WindowPolicy(window=20), HeavyPolicy(budget=64)):
        llm.generate(prompts, params, use_tqdm=False, kv_policy=policy, kv_quality=True)
    print(llm.engine.report)
print("numba" in sys.modules)
"""


def run(cache: Path, *command: str) -> str:
    environment = {**os.environ, "TRANSOM_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_a_start_after_compiling_compiles_nothing(tiny_model: Path, tmp_path: Path) -> None:
    compile_it = ("-m", "transom_cluster.cli", "compile", str(tiny_model))
    assert "kernels compiled in" in run(tmp_path, *compile_it)
    assert "Every kernel was compiled already" in run(tmp_path, *compile_it)
    served = run(tmp_path, "-c", SERVED, str(tiny_model))
    assert "operators run as kernels compiled for this CPU\n" in served
    assert served.endswith("False\n")


def test_the_first_start_says_what_compiling_took(tiny_model: Path, tmp_path: Path) -> None:
    served = run(tmp_path, "-c", SERVED, str(tiny_model))
    assert "kernels compiled for this CPU (compiling them took " in served
