"""The llama model against transformers' own, on tiny random weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.models.tiny_runner import TinyRunner
from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import read_architecture, with_windows
from transom_worker.models.parallel import Parallel
from transom_worker.models.registry import build_model
from transom_worker.models.weights.checkpoint import check_shape

VOCAB = 211
LENGTHS = {"one": 1, "three": 3, "four": 4, "five": 5, "long": 37, "longer": 61}
PROMPTS = {name: [(7 * i * i + 31 * n + i) % VOCAB for i in range(n)] for name, n in LENGTHS.items()}


def make_pair(dtype=torch.float32, quantization="none", window=None, **options):
    """transformers' model and ours over the same weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=options.pop("head_dim", 8),
        max_position_embeddings=256,
        rope_theta=5000.0,
        initializer_range=0.2,
        attn_implementation="eager",
        **{"tie_word_embeddings": True, **options},
    )
    theirs = LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)  # not .to(): it would round the rotary frequencies
    architecture = read_architecture(config.to_dict())
    if window is not None:
        architecture = with_windows(architecture, **window)
    state = theirs.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    ours = build_model(architecture, reader(state), dtype=dtype, device="cpu", quantization=quantization)
    return theirs, ours, architecture


def reader(state):
    """Weights of a state dictionary."""
    return lambda name, *, shape=None, part=(): check_shape(state[name], shape, name=name, file="memory")[part]


@torch.inference_mode()
def reference_logits(theirs, tokens, masks=None):
    """[positions, V]; `masks` gives each layer its own boolean mask."""
    if masks is None:
        return theirs(torch.tensor([tokens])).logits[0].float()
    hooks = []
    for layer, mask in zip(theirs.model.layers, masks, strict=True):
        bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
        hooks.append(
            layer.register_forward_pre_hook(
                lambda _m, args, kwargs, bias=bias: (args, {**kwargs, "attention_mask": bias}), with_kwargs=True
            )
        )
    logits = theirs(torch.tensor([tokens])).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits


def log_probs(logits):
    return F.log_softmax(logits, dim=-1)


def assert_same(ours, theirs):
    torch.testing.assert_close(log_probs(ours), log_probs(theirs), atol=1e-4, rtol=0)
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 12}],
    ids=str,
)
def test_all_prompts_at_once_equal_transformers(options):
    theirs, ours, architecture = make_pair(**options)
    logits = TinyRunner(ours, architecture, torch.float32).step(PROMPTS, all_rows=True)
    for name, prompt in PROMPTS.items():
        assert_same(logits[name], reference_logits(theirs, prompt))


@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_chunks_and_decoding_equal_transformers(chunk):
    """Prompts enter in chunks beside sequences that already decode."""
    theirs, ours, architecture = make_pair()
    runner = TinyRunner(ours, architecture, torch.float32)
    produced = {name: [] for name in PROMPTS}
    while any(len(tokens) < 5 for tokens in produced.values()):
        work = {}
        for name, prompt in PROMPTS.items():
            sequence = prompt + produced[name]
            done = len(runner.tokens.get(name, []))
            if len(produced[name]) < 5:
                work[name] = sequence[done : done + chunk]
        for name, logits in runner.step(work).items():
            if len(runner.tokens[name]) == len(PROMPTS[name]) + len(produced[name]):
                assert_same(logits, reference_logits(theirs, runner.tokens[name])[-1:])
                produced[name].append(int(logits.argmax()))


@pytest.mark.parametrize(
    "window",
    [
        {"window": 1, "sinks": 0, "pattern": "S"},
        {"window": 8, "sinks": 0, "pattern": "SF"},
        {"window": 7, "sinks": 3, "pattern": "SSF"},
    ],
    ids=str,
)
def test_windows_equal_transformers_with_the_same_masks(window):
    theirs, ours, architecture = make_pair(window=window)
    runner = TinyRunner(ours, architecture, torch.float32)
    for first in (5, 7, 8, 9, 30):
        prompt = PROMPTS["longer"]
        name = str(first)
        whole = runner.step({name: prompt[:first]}, all_rows=True)[name]
        rest = runner.step({name: prompt[first:-1]}, all_rows=True)[name]
        last = runner.step({name: prompt[-1:]})[name]
        p, k = torch.arange(len(prompt))[:, None], torch.arange(len(prompt))[None]
        causal = k <= p
        sliding = causal & ((k > p - window["window"]) | (k < window["sinks"]))
        pattern = window["pattern"]
        masks = [sliding if pattern[i % len(pattern)] == "S" else causal for i in range(3)]
        assert_same(torch.cat([whole, rest, last]), reference_logits(theirs, prompt, masks))


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
    unknown = type(architecture)(**{**{f: getattr(architecture, f) for f in architecture.__slots__}, "family": "x"})
    with pytest.raises(ModelError, match="'x'"):
        build_model(unknown, lambda name: torch.zeros(1), **options)  # type: ignore[arg-type]
