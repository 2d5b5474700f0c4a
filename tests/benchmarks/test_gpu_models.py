"""The GPU's whole-model benchmarks at sizes for a CPU: the model that was meant, honest counts, and differences that show."""

import argparse

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import families, models
from benchmarks.gpu.engines import prompts
from benchmarks.gpu.geometries import GEOMETRIES, RandomWeights, config_json, geometry
from benchmarks.gpu.roofline import num_launches, weight_bytes
from tests.engine_driver import Whole
from transom_core.contract import Logprob, TokenLogprobs
from transom_core.model_config.architecture import read_architecture

pytestmark = pytest.mark.usefixtures("torch_operators")
CPU = torch.device("cpu")
TINY = argparse.Namespace(device="cpu", tiny=True, quick=False, at_once=2)
ABOUT = {"ceilings": {"copy_bytes_per_s": 1e9, "matrix_flops_per_s": 1e9}}


@pytest.mark.parametrize("name", models.MEASURED)
def test_the_engine_has_the_model_that_transformers_makes_of_the_weights(name: str) -> None:
    found = models.answer(TINY, f"{name} graphs prefill", ABOUT)
    config = geometry(name, tiny=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    weights = RandomWeights(CPU)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(weights(parameter_name, shape=tuple(parameter.shape)))
        logits = model(torch.tensor(prompts(1, models.TINY_PROMPT, config.vocab_size))).logits[0, -1].float()
    assert logits[found["first_token"]] > logits.max() - 0.05  # bfloat16: of near ties any
    assert found["status"] == "passed"
    assert found["reached"]["matrix rate"] > 0


def test_a_decode_figure() -> None:
    found = models.answer(TINY, "gpt_oss graphs decode 3 40", ABOUT)
    assert found["tokens_per_s"] == pytest.approx(3 / found["step_s"])
    assert found["steps"] == 3 * models.TINY_STEPS
    assert found["spread"] >= 0
    assert found["kv_pool_bytes"] > 0
    assert found["kernels_s"] > 0
    assert found["launches"] > 10  # of torch's operators, which torch's profiler counts instead of a GPU's kernels
    assert found["reached"]["floor"] == pytest.approx(found["floor_s"] / found["step_s"])


def test_a_prefix_hit_and_mixed_steps() -> None:
    hit = models.answer(TINY, "llama graphs prefix", ABOUT)
    assert hit["cached"] >= hit["more"] > 0
    assert hit["seconds"] > 0
    mixed = models.answer(TINY, "llama graphs mixed", ABOUT)
    assert mixed["tokens"] > mixed["batch"]
    assert mixed["tokens_per_s"] > 0


def test_predictions_count_the_weights_as_published() -> None:
    """Of gpt-oss the checkpoints' sizes without norms, biases and routers: 13.8 and 65.2 GB."""
    sizes = {name: weight_bytes(read_architecture(config_json(geometry(name)))) / 1e9 for name in GEOMETRIES}
    assert sizes == pytest.approx({"llama": 16.06, "gpt_oss": 13.8, "gpt_oss_120b": 65.2}, rel=0.01)
    assert num_launches(read_architecture(config_json(geometry("llama")))) == 10 * 32 + 8


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
    found = families.compare([right], [near])
    assert (found.tokens, found.excused, found.wrong) == (1, 1, [])
    assert found.worst == pytest.approx(1e-4)
    far = whole((7, -0.5, -2.0), (2, -0.7, -0.8), (3, -1.0, -4.0))
    assert len(families.compare([right], [far]).wrong) == 1
    lost = whole((1, float("nan"), -2.0), (2, -0.7, -0.7), (3, -1.0, -4.0))
    assert families.compare([right], [lost]).worst == float("inf")


@pytest.mark.parametrize("name", ["mistral", pytest.param(families.V4, marks=pytest.mark.exhaustive)])
def test_a_family_beside_itself(name: str) -> None:
    found = families.answer(TINY, name, {})
    assert (found["status"], found["error"]) == ("passed", "")
    assert found["tokens"] == 5 * 2 * 6
    assert found["same_bits_twice"]
