"""The llama model against transformers' own, on tiny random weights: what `FamilyTests` do not ask, such as bfloat16 and int8."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.models.tiny_runner import TinyRunner
from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import read_architecture
from transom_worker.models.parallel import Parallel
from transom_worker.models.registry import build_model
from transom_worker.models.weights.checkpoint import check_shape

VOCAB = 211
LENGTHS = {"one": 1, "three": 3, "four": 4, "five": 5, "long": 37, "longer": 61}
PROMPTS = {name: [(7 * i * i + 31 * n + i) % VOCAB for i in range(n)] for name, n in LENGTHS.items()}


def make_pair(dtype=torch.float32, quantization="none"):
    """transformers' model and ours over the same weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_theta=5000.0,
        initializer_range=0.2,
        attn_implementation="eager",
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)  # not .to(): it would round the rotary frequencies
    architecture = read_architecture(config.to_dict())
    state = theirs.state_dict()
    del state["lm_head.weight"]
    ours = build_model(architecture, reader(state), dtype=dtype, device="cpu", quantization=quantization)
    return theirs, ours, architecture


def reader(state):
    """Weights of a state dictionary."""
    return lambda name, *, shape=None, part=(): check_shape(state[name], shape, name=name, file="memory")[part]


@torch.inference_mode()
def reference_logits(theirs, tokens):
    """[positions, V]"""
    return theirs(torch.tensor([tokens])).logits[0].float()


def log_probs(logits):
    return F.log_softmax(logits, dim=-1)


def test_bfloat16_is_as_close_to_float32_as_transformers():
    exact, _, _ = make_pair()
    theirs, ours, architecture = make_pair(dtype=torch.bfloat16)
    logits = TinyRunner(ours, architecture, torch.bfloat16).step(PROMPTS, all_rows=True)
    ours_error, theirs_error = 0.0, 0.0
    for name, prompt in PROMPTS.items():
        wanted = log_probs(reference_logits(exact, prompt))
        ours_error += float((log_probs(logits[name]) - wanted).abs().mean())
        theirs_error += float((log_probs(reference_logits(theirs, prompt)) - wanted).abs().mean())
    assert ours_error < 1.3 * theirs_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_stays_close(dtype):
    theirs, _, _ = make_pair()
    _, ours, architecture = make_pair(dtype=dtype, quantization="int8")
    runner = TinyRunner(ours, architecture, dtype)
    logits = torch.cat([*runner.step(PROMPTS, all_rows=True).values(), *runner.step({"alone": [3]}).values()])
    prompts = [*PROMPTS.values(), [3]]
    wanted = torch.cat([reference_logits(theirs, prompt) for prompt in prompts])
    assert torch.isfinite(logits).all()
    assert F.cosine_similarity(logits, wanted).mean() > 0.97


def test_no_logits_wanted_gives_none():
    _, ours, architecture = make_pair(dtype=torch.bfloat16)
    runner = TinyRunner(ours, architecture, torch.bfloat16)
    assert runner.step({"five": PROMPTS["five"]}, logit_rows=[])["five"].shape == (0, VOCAB)


def test_weight_bytes_count_each_tensor_once():
    theirs, ours, _ = make_pair()
    assert ours.weight_bytes == sum(p.nbytes for p in theirs.parameters())


def test_what_is_not_supported_is_refused():
    _, _, architecture = make_pair()
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    with pytest.raises(ConfigError, match=r"6 query heads.*at most 6"):
        build_model(architecture, lambda name: torch.zeros(1), parallel=Parallel(rank=0, size=7), **options)  # type: ignore[arg-type]
    unknown = replace(architecture, family="x")
    with pytest.raises(ModelError, match="'x'"):
        build_model(unknown, lambda name: torch.zeros(1), **options)  # type: ignore[arg-type]
