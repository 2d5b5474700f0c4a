"""Device, dtype, EOS tokens and threads, from settings and checkpoint; and the progress that a rank reports while it compiles."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.worker.models.test_architecture import SMALL
from transom_core.config import ModelConfig
from transom_core.model_files.resolve import ModelFiles, eos_token_ids
from transom_kernels.cpu import threads
from transom_kernels.cpu.kernel import CpuKernel, statistics
from transom_kernels.launch import has_triton
from transom_worker.execution.setup import load_progress, model_loading
from transom_worker.execution.setup.load_progress import compile_progress

LLAMA = SMALL | {"num_hidden_layers": 3}


def files(config: dict[str, object], generation_config: dict[str, object] | None = None) -> ModelFiles:
    return ModelFiles(name="x", path=Path("x"), is_gguf=False, config=config, generation_config=generation_config or {})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": [3]}, {"eos_token_id": None}, (3,)),
        ({}, {}, ()),
        ({"text_config": {"eos_token_id": [7, 8]}}, {}, (7, 8)),
        ({"text_config": {"eos_token_id": [7, 8]}, "eos_token_id": 9}, {}, (9,)),
    ],
)
def test_ends_of_text(config: dict[str, object], generation: dict[str, object], expected: tuple[int, ...]) -> None:
    assert eos_token_ids(files(config, generation)) == expected


def test_the_longest_sequence_chooses_the_factors_of_longrope() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8, "original_max_position_embeddings": 512}
    config = LLAMA | {"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "longrope", **factors}}
    for length, factor in ((None, 9.0), (513, 9.0), (512, 1.0)):
        shape = model_loading.model_architecture(files(config), ModelConfig(model="x", max_model_len=length))
        assert [rope and rope.pair_factors for rope in shape.ropes] == [(factor,) * 8] * 3


def test_threads_as_set_or_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    asked_for_kernels: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(threads, "set_num_threads", asked_for_kernels.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(threads, "num_usable_cores", lambda: 12)
    model_loading.set_threads(3)
    model_loading.set_threads(None)
    assert asked == asked_for_kernels == [3, 12]


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
