"""The GPU's whole-model benchmarks at sizes for a CPU: same weights for both engines, honest counts, and differences that show."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM

import gpu_families
import gpu_models
from gpu_engines import prompts
from gpu_geometries import GEOMETRIES, config_json, geometry, weights_of
from gpu_results import write
from tests.engine_driver import Whole
from transom_core.contract import Logprob, TokenLogprobs
from transom_core.model_config.architecture import read_architecture
from transom_kernels.launch import prefer

CPU = torch.device("cpu")
TINY = argparse.Namespace(device="cpu", tiny=True, quick=False, at_once=2)


def test_random_weights_are_a_function_of_name_and_shape() -> None:
    weights = weights_of(geometry("llama", tiny=True), CPU)
    one = weights("a.weight", shape=(6, 4)).clone()
    assert not torch.equal(weights("b.weight", shape=(6, 4)), one)
    assert torch.equal(weights("a.weight", shape=(6, 4), part=(slice(2, 4),)), one[2:4])
    assert abs(float(weights("x.norm.weight", shape=(4000,)).float().mean()) - 1) < 0.01
    assert abs(float(weights_of(geometry("gemma3"), CPU)("norm.weight", shape=(4000,)).float().mean())) < 0.01


@pytest.mark.parametrize("name", GEOMETRIES)
def test_both_engines_have_the_same_model(name: str) -> None:
    found = gpu_models.answer(TINY, f"{name} transom prefill")
    config = geometry(name, tiny=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    weights = weights_of(config, CPU)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(weights(parameter_name, shape=tuple(parameter.shape)))
        logits = model(torch.tensor(prompts(1, gpu_models.TINY_PROMPT, config.vocab_size))).logits[0, -1].float()
    assert logits[found["first_token"]] > logits.max() - 0.05  # bfloat16: of near ties any
    assert found["status"] == "passed"
    assert found["share_of_matrix_rate"] > 0


def test_a_decode_figure() -> None:
    with prefer("reference"):  # torch's profiler counts torch's operators in place of a GPU's kernels
        found = gpu_models.answer(TINY, "gpt_oss transom decode 3")
    assert found["tokens_per_s"] == pytest.approx(3 / found["step_s"])
    assert found["steps"] == 3 * gpu_models.TINY_STEPS
    assert found["spread"] >= 0
    assert found["kv_pool_bytes"] > 0
    assert found["kernels_s"] > 0
    assert found["launches"] > 10
    assert found["share_of_floor"] == pytest.approx(found["floor_s"] / found["step_s"])


@pytest.mark.skipif(not importlib.util.find_spec("psutil"), reason="transformers measures a CPU's memory with psutil")
def test_transformers_decode_figure() -> None:
    found = gpu_models.answer(TINY, "llama transformers decode 3")
    assert found["tokens_per_s"] == pytest.approx(3 / found["step_s"])


@pytest.mark.parametrize(("name", "billions"), [("llama", (8.0, 8.1)), ("gpt_oss", (7.7, 7.8)), ("gemma3", (3.8, 4.0))])
def test_published_sizes(name: str, billions: tuple[float, float]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(geometry(name))
    assert billions[0] < sum(parameter.numel() for parameter in model.parameters()) / 1e9 < billions[1]


def test_bytes_of_a_step() -> None:
    llama = read_architecture(config_json(geometry("llama")))
    table = 2 * 128_256 * 4096
    assert (
        gpu_models.step_bytes(llama, 16_000_000_000, 2, 1000)
        == 16_000_000_000 - table + 2 * 1000 * 32 * 2 * 2 * 8 * 128
    )
    gpt_oss = read_architecture(config_json(geometry("gpt_oss")))
    experts, table = 2 * 8 * 3 * 32 * 2880 * 2880, 2 * 201_088 * 2880
    cached = 4 * 2 * 2 * 8 * 64 * (1000 + 128)
    read = gpu_models.step_bytes(gpt_oss, experts + table, 1, 1000)
    assert read == pytest.approx(experts * 4 / 32 + cached, rel=1e-9)
    gemma = read_architecture(config_json(geometry("gemma3")))
    assert gpu_models.step_bytes(gemma, 10**9, 1, 4000) == 10**9 + 2 * 2 * 4 * 256 * (5 * 4000 + 29 * 1024)


def whole(*steps: tuple[int, float, float]) -> Whole:
    """Steps of a token, its log-probability, and the next best's."""
    logprobs = []
    for token, mine, next_best in steps:
        chosen = Logprob(token_id=token, logprob=mine, rank=1)
        logprobs.append(TokenLogprobs(chosen=chosen, top=(chosen, Logprob(token_id=999, logprob=next_best, rank=2))))
    return Whole(token_ids=[token for token, _, _ in steps], logprobs=logprobs)


def test_divergences_are_excused_at_near_ties_alone() -> None:
    right = whole((1, -0.5, -2.0), (2, -0.7, -0.70005), (3, -1.0, -4.0))
    near = whole((1, -0.5001, -2.0), (9, -0.7, -0.8), (8, -1.0, -4.0))
    found = gpu_families.compare([right], [near])
    assert (found.tokens, found.excused, found.wrong) == (1, 1, [])
    assert found.worst == pytest.approx(1e-4)
    far = whole((7, -0.5, -2.0), (2, -0.7, -0.8), (3, -1.0, -4.0))
    assert len(gpu_families.compare([right], [far]).wrong) == 1
    lost = whole((1, float("nan"), -2.0), (2, -0.7, -0.7), (3, -1.0, -4.0))
    assert gpu_families.compare([right], [lost]).worst == float("inf")


@pytest.mark.parametrize("name", ["mistral", gpu_families.V4])
def test_a_family_beside_itself(name: str) -> None:
    found = gpu_families.answer(TINY, name)
    assert found["status"] == "passed"
    assert found["tokens"] == 5 * 2 * 6
    assert found["same_bits_twice"]
    assert found["alone_wrong"] == 0


def test_families_through_a_child_process(tmp_path: Path) -> None:
    assert (
        gpu_families.main(["--device", "cpu", "--tiny", "--only", "qwen2", "--budget-s", "0.5", "--out", str(tmp_path)])
        == 0
    )
    written = json.loads((tmp_path / "families.json").read_text())
    assert [result["status"] for result in written["results"]] == ["skipped"]


def test_results_fit_their_schema(tmp_path: Path) -> None:
    found = gpu_models.answer(TINY, gpu_models.ABOUT)
    results = [{"job": "llama transom decode 1", **gpu_models.answer(TINY, "llama transom decode 1")}]
    about = found["about"] | {"ceilings": found["ceilings"], "clocks": found["clocks"]}
    path = write(tmp_path, "models", about=about, report=gpu_models.model_report(TINY, found, results))
    schema = Path(gpu_models.__file__).parent / "results" / "gpu.schema.json"
    jsonschema.validate(json.loads(path.read_text()), json.loads(schema.read_text()))
    assert "| llama transom decode 1 | passed |" in path.with_suffix(".md").read_text()
