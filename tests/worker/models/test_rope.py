"""Frequencies from configs in every form, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from tests.worker.models.test_architecture import SMALL
from transom_core.model_config.architecture import read_architecture
from transom_worker.models.frequencies import frequencies

CPU = torch.device("cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 8.0, "original_max_position_embeddings": 512}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}

FORMS: dict[str, tuple[type, dict[str, Any]]] = {
    "default": (LlamaRotaryEmbedding, {"rope_theta": 5e5}),
    "linear by its old name": (LlamaRotaryEmbedding, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama3": (LlamaRotaryEmbedding, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "yarn": (LlamaRotaryEmbedding, {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}}),
    "yarn by mscale": (
        LlamaRotaryEmbedding,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "yarn not truncated": (
        GptOssRotaryEmbedding,
        {
            "model_type": "gpt_oss",
            "sliding_window": 8,
            "rope_theta": 150_000.0,
            "rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "gemma3 as published": (
        Gemma3RotaryEmbedding,
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 2e6},
    ),
    "gemma3 with a local base": (
        Gemma3RotaryEmbedding,
        {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 2e4},
    ),
    "gemma4 by default": (Gemma4TextRotaryEmbedding, {"model_type": "gemma4_text", "global_head_dim": 32}),
    "gemma4": (
        Gemma4TextRotaryEmbedding,
        {
            "model_type": "gemma4_text",
            "global_head_dim": 32,
            "rope_parameters": {"sliding_attention": PLAIN, "full_attention": PROPORTIONAL},
        },
    ),
    "olmo3 as published": (
        Olmo3RotaryEmbedding,
        {"model_type": "olmo3", "sliding_window": 8, "rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_frequencies_are_transformers(form: str) -> None:
    embedding, changes = FORMS[form]
    raw = SMALL | changes
    architecture = read_architecture(raw)
    theirs = embedding(AutoConfig.for_model(**raw))
    for layer, rope in zip(architecture.layers, architecture.ropes, strict=True):
        assert rope is not None
        prefix = ("sliding_attention_" if layer.window else "full_attention_") if hasattr(theirs, "layer_types") else ""
        torch.testing.assert_close(frequencies(rope, CPU), getattr(theirs, f"{prefix}inv_freq"), rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(getattr(theirs, f"{prefix}attention_scaling"))
