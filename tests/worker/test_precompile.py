"""`transom compile` fills the cache of kernels: a start after it compiles nothing, and says so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from transom_cluster.cli import app
from transom_core.machine import gpus

pytestmark = pytest.mark.exhaustive  # they compile every kernel of a model

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
    assert "kernels compiled for this CPU (compiling them took " in run(tmp_path, "-c", SERVED, str(tiny_model))


STARTED_ON_GPU = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.adapter_folders import adapt_checkpoint
from tests.engine_driver import make_engine, make_request, run
from transom_kernels.absent_device import absent_gpu, no_work
missing = []
def note(*, src, cache_hit, **_):
    if not cache_hit:
        missing.append(src.name)
with absent_gpu((9, 0), note), no_work():
    tight = {"kv_cache_memory_bytes": "600KiB", "swap_space": "4MiB", "preemption_mode": "swap"}
    adapters = [adapt_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))[0]] if len(sys.argv) > 2 else [None]
    tight |= {"enable_lora": len(sys.argv) > 2}
    engine = make_engine(
        sys.argv[1], device="cpu", dtype="bfloat16", max_num_seqs=12, max_num_batched_tokens=512, max_model_len=1024, **tight
    )
    sampled = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "logprobs": 2, "presence_penalty": 0.5}
    for length in (1, 7, 60, 380, 1000):
        prompts = [[1 + (i + 7 * j) % 50 for i in range(length)] for j in range(3)]
        asked = [{}, sampled, {"temperature": 1.0, "top_k": 5}]
        requests = [make_request(f"{length} {i}", prompts[i], max_tokens=24, **one) for i, one in enumerate(asked)]
        run(engine, [replace(one, adapter=adapters[0]) for one in requests])
    assert engine.scheduler.work.num_swaps
    engine.shutdown()
print("missing:", missing)
"""


@pytest.mark.parametrize("lora", [[], ["--enable-lora"]])
def test_kernels_of_a_gpu_that_is_not_there(
    lora: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start on a GPU of this compute capability finds all kernels: other batches, lengths and sampling compile none."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu = ("--dtype", "bfloat16", "--device", "cuda", *lora)
    compile_it = ("-m", "transom_cluster.cli", "compile", str(tiny_model), *gpu)
    assert re.search(r"^[1-3]\d kernels compiled in .*/triton\.", run(tmp_path, *compile_it, "--capability", "9.0"))
    assert "Every kernel was compiled already" in run(tmp_path, *compile_it, "--capability", "9.0")
    adapters = [str(tmp_path)] * len(lora)
    assert run(tmp_path, "-c", STARTED_ON_GPU, str(tiny_model), *adapters).endswith("missing: []\n")


@pytest.mark.parametrize(
    ("capability", "message"),
    [("7.5", "known are 8.0, "), ("9", "two numbers with a dot"), (None, "This machine has no GPU")],
)
def test_a_gpu_that_has_no_kernels(
    tiny_model: Path, capability: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "read_driver", lambda: gpus.NO_DRIVER)
    given = [] if capability is None else ["--capability", capability]
    result = CliRunner().invoke(app, ["compile", str(tiny_model), "--device", "cuda", *given])
    assert (result.exit_code, message in result.stderr) == (2, True), result.output
