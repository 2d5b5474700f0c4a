"""MoE sizes from configs, and errors for configs that are not supported."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from transom_core.errors import ModelError
from transom_core.model_config.architecture import read_architecture
from transom_core.model_config.mixture import Mixture

SMALL: dict[str, Any] = {
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "v_head_dim": 16,
}


def mixture(family: str, **changes: Any) -> Mixture:
    found = read_architecture(SMALL | {"model_type": family} | changes).mixture
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("mixtral", {}, {0, 1, 2, 3, 4, 5, 6}),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}, {1, 2, 4, 5, 6}),
        ("qwen3_moe", {"decoder_sparse_step": 3}, {2, 5}),
        ("llama4_text", {"interleave_moe_layer_step": 2}, {1, 3, 5}),
        ("llama4_text", {"moe_layers": [4]}, {4}),
        ("mimo_v2_flash", {}, {1, 2, 3, 4, 5, 6}),
        ("mimo_v2_flash", {"mlp_layer_types": ["sparse"] + ["dense"] * 6}, {0}),
    ],
)
def test_which_layers_have_experts(family: str, changes: dict[str, Any], layers: set[int]) -> None:
    assert mixture(family, **changes).layers == layers


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "mimo_v2_flash"])
def test_what_configs_leave_out_is_transformers_default(family: str) -> None:
    sizes = {name: value for name, value in SMALL.items() if name not in ("attention_chunk_size", "v_head_dim")}
    written = AutoConfig.for_model(family, **sizes).to_dict()
    assert mixture(family) == mixture(family, **written)


def test_sizes_and_weights() -> None:
    llama4 = mixture("llama4_text", intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=2)
    assert (llama4.inner_size, llama4.dense_size, llama4.num_experts, llama4.num_chosen) == (96, 48, 4, 2)
    qwen3 = mixture("qwen3_moe", moe_intermediate_size=32)
    assert (qwen3.inner_size, qwen3.dense_size, qwen3.normalise) == (32, 96, False)
    assert mixture("gpt_oss", swiglu_limit=3.0).clamp == 3.0
    assert mixture("mimo_v2_flash", routed_scaling_factor=None).scale == 1.0


def test_dense_families_have_none() -> None:
    assert read_architecture(SMALL | {"model_type": "llama"}).mixture is None


def test_attention_of_mimo() -> None:
    layers = read_architecture(SMALL | {"model_type": "mimo_v2_flash"}).layers
    assert [layer.window for layer in layers] == [None, 8, 8, 8, 8, None, 8]
    assert [layer.num_kv_heads for layer in layers] == [2, 4, 4, 4, 4, 2, 4]
    assert {(layer.head_size, layer.value_size) for layer in layers} == {(24, 16)}


def test_qwen3_moe_slides_everywhere_or_nowhere() -> None:
    """Unlike qwen3's dense layers, as transformers has it."""
    for uses in (True, False):
        layers = read_architecture(SMALL | {"model_type": "qwen3_moe", "use_sliding_window": uses}).layers
        assert {layer.window for layer in layers} == {8 if uses else None}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts per token are to be chosen from 8"),
        ("mixtral", {"num_experts_per_tok": 0}, "0 experts per token"),
        ("mixtral", {"num_local_experts": "many"}, "no size or number"),
        ("mimo_v2_flash", {"n_group": 4}, "n_group above 1"),
    ],
)
def test_what_cannot_be_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        mixture(family, **changes)
