"""Attention layers from configs of many families, and errors for configs that are not supported."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import (
    RUNNABLE_FAMILIES,
    LayerAttention,
    choose_max_model_len,
    read_architecture,
    runnable,
)
from transom_worker.models.registry import FAMILIES

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def kinds(**changes: Any) -> str:
    """A letter by layer: Full, Sliding, Chunked."""
    layers = read_architecture(SMALL | changes).layers
    return "".join("S" if layer.window else "C" if layer.chunk else "F" for layer in layers)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "FFFFFF"),
        ({"model_type": "mistral", "sliding_window": 64}, "SSSSSS"),
        ({"model_type": "mistral", "sliding_window": None}, "FFFFFF"),
        ({"model_type": "mistral"}, "SSSSSS"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False, "max_window_layers": 4}, "FFFFFF"),
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, "FFFFSS"),
        ({"model_type": "gemma2", "sliding_window": 64}, "SFSFSF"),
        ({"model_type": "gemma3_text", "sliding_window": 64}, "SSSSSF"),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 3}, "SSFSSF"),
        ({"model_type": "gpt_oss", "sliding_window": 64}, "SFSFSF"),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, "CCCFCC"),
        ({"model_type": "llama4_text", "attention_chunk_size": 64, "no_rope_layers": [1, 0] * 3}, "CFCFCF"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 6, "sliding_window": 9}, "SSSSSS"),
    ],
)
def test_layer_types_by_family(changes: dict[str, Any], expected: str) -> None:
    assert kinds(**changes) == expected


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "llama4_text"])
def test_the_rules_are_those_of_transformers(family: str) -> None:
    """What transformers writes out, its layer types, is what we make of the config without them."""
    sizes = SMALL | {"model_type": family, "num_hidden_layers": 12}
    config = AutoConfig.for_model(**sizes).to_dict()
    without = {key: value for key, value in config.items() if key not in ("layer_types", "no_rope_layers")}
    assert read_architecture(without).layers == read_architecture(config).layers


def test_mimo_as_published() -> None:
    """Under names of its own, and with windows that do not count the query."""
    published = SMALL | {
        "model_type": "mimo_v2_flash",
        "layernorm_epsilon": 1e-5,
        "v_head_dim": 8,
        "sliding_window": 128,
    }
    del published["rms_norm_eps"]
    published |= {
        "sliding_window_size": 128,
        "moe_intermediate_size": 32,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "n_routed_experts": 8,
    }
    published |= {"partial_rotary_factor": 0.334, "routed_scaling_factor": None, "swa_num_key_value_heads": 4}
    ours = read_architecture(published)
    assert ours == read_architecture(AutoConfig.for_model(**published).to_dict())
    assert ours.layers[1].window == 129


def test_gpt_oss_in_4_bits_is_computed_in_bfloat16() -> None:
    config = SMALL | {"model_type": "gpt_oss", "sliding_window": 128}
    assert read_architecture(config).served_dtype == "bfloat16"
    assert read_architecture(config | {"dtype": "float32"}).served_dtype == "float32"


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gemma4_text"])
def test_what_a_published_config_leaves_out_is_transformers_default(family: str) -> None:
    config = AutoConfig.for_model(family).to_dict()
    assert read_architecture({"model_type": family, "dtype": config["dtype"]}) == read_architecture(config)


def test_deepseek_v4_in_both_forms() -> None:
    sizes = SMALL | {"model_type": "deepseek_v4", "qk_rope_head_dim": 4, "index_head_dim": 8, "sliding_window": 8}
    sizes |= {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]}
    ours = read_architecture(sizes).layers
    config = AutoConfig.for_model(**sizes).to_dict()
    assert ours == read_architecture(config).layers
    assert [layer.compression and layer.compression.ratio for layer in ours] == [None, 4, 128, 4]
    assert all(layer.window == 8 and layer.latent for layer in ours)
    assert (ours[1].compression.overlap, ours[1].compression.index_size) == (1, 8)  # type: ignore[union-attr]


def test_gemma4_global_layers_have_their_own_heads() -> None:
    sizes = {"model_type": "gemma4_text", "sliding_window": 8, "global_head_dim": 32, "num_global_key_value_heads": 1}
    sizes["attention_k_eq_v"] = True
    layers = read_architecture(SMALL | sizes).layers
    assert layers[5] == LayerAttention(num_heads=4, num_kv_heads=1, head_size=32)
    assert layers[4] == LayerAttention(num_heads=4, num_kv_heads=2, head_size=16, window=8)


def test_gemma4_layers_that_share_a_cache_read_the_last_of_their_type() -> None:
    sizes = {"model_type": "gemma4_text", "sliding_window": 8, "num_kv_shared_layers": 4, "num_hidden_layers": 12}
    sizes["layer_types"] = ["sliding_attention", "full_attention"] * 6
    layers = read_architecture(SMALL | sizes).layers
    assert [layer.reads_cache_of for layer in layers] == [None] * 8 + [6, 7, 6, 7]


def test_a_model_that_also_sees_is_its_text_decoder() -> None:
    text = SMALL | {"model_type": "gemma3_text", "sliding_window": 64}
    assert read_architecture({"model_type": "gemma3", "text_config": text}) == read_architecture(text)
    outside = {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text | {"dtype": None}}
    assert read_architecture(outside).checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert'; known are cohere2, deepseek_v2"),
        ({"num_hidden_layers": None}, "no size or number"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "its tokens see later ones"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "its tokens see later ones"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"model_type": "mistral", "sliding_window": -5}, "layer 0 4 heads and 2 KV heads of 16, which see -5 tokens"),
        ({"model_type": "llama4_text", "attention_chunk_size": 0}, "which see 0 tokens; all must be at least 1"),
        ({"head_dim": -16}, "KV heads of -16"),
        ({"num_key_value_heads": 3}, "3 KV heads for 4 heads; they must divide them"),
        ({"layer_types": ["full_attention"]}, "lists 1 layer_types for num_hidden_layers 6"),
        ({"layer_types": ["linear_attention"] * 6}, "layer type 'linear_attention', which is not known"),
        ({"model_type": "gpt_oss"}, "lacks 'sliding_window', which a gpt_oss model needs"),
        (
            {"model_type": "gemma4_text", "sliding_window": 8, "num_kv_shared_layers": 2},
            "before these is of type 'full",
        ),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(SMALL | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma'; supported so far: 'llama'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'; supported so far: 'default'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported so far: 'silu', 'gelu_pytorch_tanh'"),
    ],
)
def test_what_can_be_planned_but_not_run_is_refused_to_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        runnable(read_architecture(SMALL | changes))


def test_families_that_run_have_a_class() -> None:
    assert set(RUNNABLE_FAMILIES) == set(FAMILIES)
    assert runnable(read_architecture(SMALL)).num_layers == 6


def test_lengths_up_to_the_models() -> None:
    architecture = read_architecture(SMALL)
    assert choose_max_model_len(None, architecture) == 4096
    assert choose_max_model_len(100, architecture) == 100
    with pytest.raises(ConfigError, match="--max-model-len is 5000; the model reaches 4096 tokens"):
        choose_max_model_len(5000, architecture)
