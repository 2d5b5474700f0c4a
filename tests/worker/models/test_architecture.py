"""Attention layers and experts from configs of many families, the frequencies of RoPE in every form against transformers' own, and
errors for configs that are not supported.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from tests.checkpoints import SIZES
from tests.present import present
from tests.worker.planner.model_configs import CONFIGS
from transom_core.errors import ConfigError, ModelError
from transom_core.model_config.architecture import choose_max_model_len, read_architecture, runnable, with_windows
from transom_core.model_config.attention_layers import FULL, LAYER_TYPES
from transom_core.model_config.mixture import Mixture
from transom_core.model_config.mla import MLA_FAMILIES, Indexer
from transom_core.model_config.rank_shares import rank_lines, rank_shares
from transom_core.model_config.sharding import check_size, largest_size
from transom_worker.models.layers.rotary_embedding import frequencies
from transom_worker.models.registry import FAMILIES

SMALL = SIZES | {"model_type": "llama", "num_hidden_layers": 6, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "llama4_text"),
        *("cwm", "granite_swa", "exaone_moe", "afmoe"),
    ],
)
def test_the_rules_are_those_of_transformers(family: str) -> None:
    """What transformers writes out, its layer types, is what we make of the config without them."""
    config = AutoConfig.for_model(**(SMALL | {"model_type": family, "num_hidden_layers": 12})).to_dict()
    without = {key: value for key, value in config.items() if key not in ("layer_types", "no_rope_layers")}
    assert read_architecture(without).layers == read_architecture(config).layers


@pytest.mark.parametrize("is_on", [False, True])
def test_windows_of_qwen3_moe_have_a_switch(is_on: bool) -> None:
    raw = SMALL | {"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": is_on}
    assert {layer.window for layer in read_architecture(raw).layers} == {64 if is_on else None}


def test_mimo_as_published() -> None:
    """Under names of its own, and with windows that do not count the query."""
    published = SMALL | {"model_type": "mimo_v2_flash", "layernorm_epsilon": 1e-5, "v_head_dim": 8}
    del published["rms_norm_eps"]
    published |= {"sliding_window": 128, "sliding_window_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8}
    published |= {"rope_theta": 5_000_000, "swa_rope_theta": 10_000, "swa_num_key_value_heads": 4}
    published |= {"partial_rotary_factor": 0.334, "routed_scaling_factor": None}
    ours = read_architecture(published)
    assert ours == read_architecture(AutoConfig.for_model(**published).to_dict())
    assert ours.layers[1].window == 129


@pytest.mark.parametrize("family", ["gpt_oss", "hy_v3"])
def test_what_names_no_number_format_is_computed_in_bfloat16(family: str) -> None:
    config = SMALL | {"model_type": family, "sliding_window": 128}
    assert read_architecture(config).served_dtype == "bfloat16"
    assert read_architecture(config | {"dtype": "float32"}).served_dtype == "float32"


def test_a_tied_head_of_qwen3_vl_is_told_by_the_outer_config() -> None:
    """transformers writes its default into the inner one."""
    config = {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False}
    text = SMALL | {"model_type": "qwen3_vl_moe_text", "tie_word_embeddings": True}
    assert not read_architecture(config | {"text_config": text}).tie_embeddings


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gemma4_text"])
def test_what_a_published_config_leaves_out_is_transformers_default(family: str) -> None:
    config = AutoConfig.for_model(family).to_dict()
    assert read_architecture({"model_type": family, "dtype": config["dtype"]}) == read_architecture(config)


def test_a_model_that_also_sees_is_its_text_decoder() -> None:
    text = SMALL | {"model_type": "gemma3_text", "sliding_window": 64}
    assert read_architecture({"model_type": "gemma3", "text_config": text}) == read_architecture(text)
    outside = {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text | {"dtype": None}}
    assert read_architecture(outside).checkpoint_dtype == "bfloat16"
    qwen = SMALL | {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    assert read_architecture(qwen) == read_architecture(SMALL | {"model_type": "qwen2"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert'; known are afmoe, arcee"),
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
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 3}},
            "8 and 3 numbers as short_factor and long_factor of its longrope; a head has 8 pairs",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": "1" * 8}}, "a factor of longrope"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [0.0] * 8}}, "a factor of longrope"),
        ({"model_type": ["qwen2_vl"]}, "known are"),
        ({"model_type": "ernie4_5", "use_bias": True}, "use_bias, which is not supported"),
        ({"model_type": "lfm3", "attention_bias": True}, "attention_bias, which is not supported"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "its tokens see later ones"),
        ({"model_type": "mistral4"}, "lacks 'rope_parameters'"),
        ({"model_type": "afmoe", "score_func": "softmax"}, "score_func other than sigmoid"),
        ({"model_type": "afmoe", "n_group": 2}, "n_group above 1"),
        ({"model_type": "granite_swa", "layer_rope_theta": "123456"}, "layer_rope_theta is no list"),
        *(({"partial_rotary_factor": share}, "numbers of a head would rotate") for share in (-0.5, 0.01, 2.0, 2.0**40)),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv, a limit of queries"),
        ({"rms_norm_eps": None}, "lacks 'rms_norm_eps', which a llama model needs"),
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
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling 'dynamic'; supported so far: 'default'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported so far: 'silu', 'gelu_pytorch_tanh'"),
    ],
)
def test_what_can_be_planned_but_not_run_is_refused_to_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        runnable(read_architecture(SMALL | changes))


LFM2 = {
    **{"model_type": "lfm2", "hidden_size": 40, "num_attention_heads": 5, "num_hidden_layers": 3, "vocab_size": 9},
    **{"max_position_embeddings": 99, "block_ff_dim": 100, "full_attn_idxs": [1]},
}


def test_lfm2_configs_in_their_own_words() -> None:
    """Feed-forward layers have two thirds of the config's width, times a factor and rounded up; units have up to 16 channels."""
    architecture = runnable(read_architecture(LFM2 | {"block_multiple_of": 32, "block_ffn_dim_multiplier": 1.5}))
    assert [layer.convolution for layer in architecture.layers] == [3, None, 3]
    assert [rope is None for rope in architecture.ropes] == [True, False, True]
    assert (architecture.intermediate_size, architecture.tie_embeddings) == (128, True)
    assert read_architecture(LFM2 | {"block_auto_adjust_ff_dim": False}).intermediate_size == 100
    assert read_architecture(LFM2 | {"tie_embedding": False, "block_norm_eps": 0.5}).rms_norm_eps == 0.5
    for wrong, message in (
        ({"conv_dilation": 2}, "the field 'conv_dilation', which is not known"),
        ({"conv_dim": 80}, "conv_dim 80; only the hidden_size"),
        ({"block_use_swiglu": False}, "block_use_swiglu false"),
        ({"layer_types": ["conv", "mamba", "conv"]}, "layer type 'mamba'"),
        ({"model_type": "lfm2_moe", "use_expert_bias": False}, "use_expert_bias false"),
        ({"model_type": "qwen3_5_text", "linear_decay": 1.0}, "the field 'linear_decay'"),
        ({"model_type": "llama", "intermediate_size": 9, "rms_norm_eps": 1, "layer_types": ["conv"] * 3}, "'conv'"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(LFM2 | wrong)


def test_granite_hybrids_as_published() -> None:
    """Without experts, the shared MLP is the only one. Norms of rows have the eps divided by the residual's factor squared."""
    published = SMALL | {
        **{"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 5 + ["attention"], "num_local_experts": 0},
        **{"mamba_n_heads": 4, "shared_intermediate_size": 96, "residual_multiplier": 0.5, "rope_theta": 10_000},
    }
    theirs = AutoConfig.for_model(**published).to_dict()
    architecture = runnable(read_architecture(published))
    assert architecture == read_architecture(theirs)
    assert architecture.rms_norm_eps == 4e-5
    rotary = read_architecture(published | {"position_embedding_type": "rope"}).ropes
    assert [rope is None for rope in rotary] == [True] * 5 + [False]
    for wrong, message in (
        ({"mamba_rate": 2}, "the field 'mamba_rate', which is not known of models with Mamba-2 layers"),
        ({"time_step_floor": 1e-4}, "the field 'time_step_floor'"),
        ({"time_step_limit": [0.1, math.inf]}, "only 0 to infinity"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'; known are"),
        ({"mamba_d_head": 64}, "4 heads of 64; mamba_expand times hidden_size is 128"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(published | wrong)
    with pytest.raises(ConfigError, match="5; this granitemoehybrid model has 4 heads in Mamba-2 layers"):
        check_size(architecture, 5)


def test_nemotron_h_as_published() -> None:
    """Layers are mixers with the feed-forward networks that follow. Configs have a pattern or, saved by transformers, a list."""
    published = CONFIGS["nemotron-3-nano-30b-a3b"] | {"time_step_min": 0.001, "mamba_hidden_act": "silu"}
    architecture = runnable(read_architecture(published))
    theirs = AutoConfig.for_model(**published).to_dict()
    assert "hybrid_override_pattern" not in theirs
    assert architecture == read_architecture(theirs)
    more = {"mamba_d_conv": 4, "mamba_state_dim": 128, "time_step_rank": 256}
    assert read_architecture(published | more) == architecture
    wide = read_architecture({**published, "head_dim": None, "mamba_num_groups": 4}).layers
    assert (wide[3].head_size, wide[0].num_kv_heads) == (128, 4)
    (line,) = rank_lines(rank_shares(architecture, 1))
    assert "an expert" in line
    assert "dense" not in line
    dense = read_architecture(published | {"hybrid_override_pattern": "M-M---MM*-", "num_hidden_layers": 10})
    assert (dense.num_feed_forwards, dense.mixture, dense.intermediate_size) == ((1, 3, 0, 0, 1), None, 1024)
    for wrong, message in (
        ({"hybrid_override_pattern": "-M", "num_hidden_layers": 2}, "block 0 is '-', and no block is before it"),
        ({"hybrid_override_pattern": "M*E-", "num_hidden_layers": 4}, "block 3 is '-', and block 2 is 'E'"),
        ({"hybrid_override_pattern": "M+", "num_hidden_layers": 2}, "the block '\\+'; known are"),
        ({"layers_block_type": ["mamba", "conv"], "num_hidden_layers": 2}, "the block 'conv'"),
        ({"num_hidden_layers": 51}, "lists 52 blocks for num_hidden_layers 51"),
        ({"residual_in_fp32": True}, "residual_in_fp32 True; only False"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'; only 'silu'"),
        ({"mamba_proj_bias": True}, "its use_bias says otherwise"),
        ({"mlp_hidden_act": "silu"}, "hidden_act 'silu'; supported so far: 'relu2'"),
        ({"n_group": 3}, "n_group 3 and topk_group 1 do not fit"),
    ):
        with pytest.raises(ModelError, match=message):
            runnable(read_architecture(published | wrong))
    with pytest.raises(ModelError, match="hidden_act 'relu2'; supported so far: 'silu'"):
        runnable(read_architecture(SMALL | {"hidden_act": "relu2"}))


def test_falcon_h1_as_published() -> None:
    """A published layer is Mamba-2, and attention beside it with the MLP. Factors of projections multiply weights and biases."""
    published = CONFIGS["falcon-h1-0.5b"]
    architecture = runnable(read_architecture(published))
    assert architecture == read_architecture(AutoConfig.for_model(**published).to_dict())
    wide = read_architecture(published | {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 32})
    assert wide.layers[0] == replace(architecture.layers[0], num_heads=32)
    for wrong, message in (
        ({"value_multiplier": 2}, "the field 'value_multiplier', which is not known of Falcon-H1"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp False; only True"),
        ({"attn_layer_indices": [1]}, "attn_layer_indices .1.; only None"),
        ({"ssm_multipliers": [1.0]}, "no size or number"),
        ({"mamba_d_ssm": 1024}, "24 heads of 64; mamba_d_ssm is 1024"),
    ):
        with pytest.raises(ModelError, match=message):
            runnable(read_architecture(published | wrong))
    with pytest.raises(ConfigError, match="9; this falcon_h1 model has 8 query heads"):
        check_size(architecture, 9)


def test_jamba_as_published() -> None:
    """Channels are divided among ranks by 64; Jamba 3B has no experts."""
    published = CONFIGS["jamba-1.5-mini"]
    architecture = runnable(read_architecture(published))
    assert architecture == read_architecture(AutoConfig.for_model(**published).to_dict())
    assert largest_size(architecture).size == 32
    assert read_architecture(published | {"num_experts": 1}).mixture is None
    for wrong, message in (
        ({"mamba_rate": 2}, "the field 'mamba_rate', which is not known of Jamba"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu'"),
        ({"attn_layer_period": 0}, "no size or number"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(published | wrong)


def test_kimi_linear_as_published() -> None:
    """Layers are numbered from 1; transformers has other names of fields. Nothing rotates."""
    published = CONFIGS["kimi-linear-48b"]
    architecture = runnable(read_architecture(published))
    saved = read_architecture(AutoConfig.for_model(**published).to_dict())
    assert (architecture.layers, architecture.mla, architecture.ropes) == (saved.layers, saved.mla, (None,) * 27)
    assert architecture.mixture == saved.mixture
    own = published["linear_attn_config"]
    for wrong, message in (
        ({"linear_rate": 2}, "the field 'linear_rate'"),
        ({"linear_attn_config": own | {"gate_lower_bound": -5.0}}, "the field 'gate_lower_bound'"),
        ({"linear_attn_config": own | {"kda_layers": [1]}}, "lacks 2"),
        ({"mla_use_nope": False}, "mla_use_nope false"),
        ({"moe_router_activation_func": "softmax"}, "scoring_func 'softmax'"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(published | wrong)


def test_ling_3_as_published() -> None:
    """Some sizes have low-rank queries; what rotates is a share of a delta net's head."""
    published = CONFIGS["deepseek-v3"] | {
        **{"model_type": "bailing_hybrid", "num_hidden_layers": 20, "layer_group_size": 4, "num_experts": 128},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 640},
        **{"num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "q_lora_rank": 256},
        **{"head_dim": 128, "partial_rotary_factor": 0.5, "rotary_dim": 64, "kda_lower_bound": -5.0, "rope_theta": 1e4},
        **{"no_kda_lora": True, "use_mla_nope": False, "gated_attention_proj_granularity_type": "head_wise"},
        **{"score_function": "sigmoid", "use_qkv_bias": False, "moe_router_enable_expert_bias": True},
    }
    architecture = runnable(read_architecture(published))
    assert [layer.recurrent for layer in architecture.layers] == [4, 4, 4, None] * 5
    assert (architecture.layers[0].num_heads, architecture.layers[0].value_size) == (128, 128)
    assert architecture.mla is not None
    assert architecture.mixture is not None
    assert (architecture.mla.query_rank, architecture.mla.gates_heads, architecture.most_decay) == (256, True, 5.0)
    assert (architecture.mixture.shared_size, architecture.mixture.num_groups) == (640, 8)
    assert read_architecture(published | {"kda_safe_gate": False}).most_decay == 0
    for wrong, message in (
        ({"kda_lower_bound": 1.0}, "kda_lower_bound 1.0"),
        ({"no_kda_lora": False}, "no_kda_lora False; supported is True"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor must be 1"),
        ({"score_function": "softmax"}, "scoring_func 'softmax'"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(published | wrong)


def test_step_as_published() -> None:
    """More query heads in windows. Layers for multi-token prediction are left out of all lists; rope is scaled in full layers."""
    published = CONFIGS["step-3.5-flash"]
    architecture = runnable(read_architecture(published))
    saved = AutoConfig.for_model(**published).to_dict()
    assert architecture == replace(read_architecture(saved), scales=architecture.scales)
    assert read_architecture(saved).scales.query == 128**-0.5
    assert read_architecture({"model_type": "step3p7", "text_config": published}) == architecture
    assert {(layer.num_heads, layer.num_kv_heads, layer.window) for layer in architecture.layers} == {
        (64, 8, None),
        (96, 8, 512),
    }
    assert {(rope.kind, rope.theta, rope.size) for rope in map(present, architecture.ropes)} == {
        ("llama3", 5e6, 64),
        ("default", 1e4, 128),
    }
    mixture = present(architecture.mixture)
    assert (mixture.layers, mixture.num_experts, mixture.scale) == (frozenset(range(3, 45)), 288, 3.0)
    gate = torch.linspace(-30.0, 30.0, 601).double()
    for limits, expected in ((mixture.limits, {43: 7.0, 44: 7.0}), (mixture.dense_limits, {44: 16.0})):
        assert {index: up for index, (_, up) in limits} == expected
        silu = torch.nn.functional.silu
        for _, (most, up) in limits:
            torch.testing.assert_close(silu(gate.clamp(max=most)), silu(gate).clamp(max=up))
    for wrong, message in (
        ({"sink": True}, "sink True; only False"),
        ({"swiglu_limits": [7.0]}, "swiglu_limits is no list with a number"),
        ({"swiglu_limits": [-7.0] * 45}, "a number from 0"),
        ({"layer_types": [FULL] * 46}, "lists 46 layer_types for num_hidden_layers 45"),
        ({"attention_bias": True}, "attention_bias, which is not supported"),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(published | wrong)


def test_families_that_run_have_a_class() -> None:
    assert set(LAYER_TYPES) == set(FAMILIES)
    assert runnable(read_architecture(SMALL)).num_layers == 6


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.1"])
def test_indexers_as_published(name: str) -> None:
    """transformers' config says the same in other fields. Windows would not go with tokens that an indexer selects."""
    published = CONFIGS[name]
    architecture = runnable(read_architecture(published))
    saved = read_architecture(AutoConfig.for_model(**published).to_dict())
    assert (architecture.layers, architecture.mla) == (saved.layers, saved.mla)
    is_glm = name == "glm-5.1"
    layers = frozenset((0, 1, *range(5, 78, 4)) if is_glm else range(61))
    heads = 32 if is_glm else 64
    expected = Indexer(num_heads=heads, size=128, top_k=2048, interleaved=is_glm, layers=layers)
    assert present(architecture.mla).indexer == expected
    shared = "indexer_types must be" if is_glm else "'shared', which deepseek_v32 models do not"
    for wrong, message in (
        ({"index_topk": 0}, "index_topk 0: heads and tokens must be at least 1"),
        ({"index_head_dim": 32}, "index_head_dim 32.*as wide as qk_rope_head_dim 64"),
        ({"q_lora_rank": None}, "q_lora_rank not null"),
        ({"index_local_blocks": 2}, "the field 'index_local_blocks' is not known"),
        ({"indexer_types": ["full"]}, "indexer_types must be"),
        ({"indexer_types": ["shared"] * architecture.num_layers}, "indexer_types"),
        ({"index_topk_pattern": "FS"}, shared),
    ):
        with pytest.raises(ModelError, match=message):
            read_architecture(published | wrong)
    with pytest.raises(ConfigError, match="--window and --chunk do not fit a model whose indexer"):
        with_windows(architecture, window=8, pattern="S")


@pytest.mark.parametrize("family", MLA_FAMILIES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 0}, "'kv_lora_rank': 0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim even"),
        ({"v_head_dim": None}, "no size or number"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor must be 1"),
    ],
)
def test_sizes_of_latent_rows_that_cannot_be_are_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(SMALL | {"model_type": family, "num_experts_per_tok": 2, "rope_parameters": {}} | changes)


def test_lengths_up_to_the_models() -> None:
    architecture = read_architecture(SMALL)
    assert choose_max_model_len(None, architecture) == 4096
    assert choose_max_model_len(100, architecture) == 100
    with pytest.raises(ConfigError, match="--max-model-len is 5000; the model reaches 4096 tokens"):
        choose_max_model_len(5000, architecture)


SPARSE = SMALL | {"num_hidden_layers": 7, "sliding_window": 8, "attention_chunk_size": 8, "v_head_dim": 16}


def mixture(family: str, **changes: Any) -> Mixture:
    return present(read_architecture(SPARSE | {"model_type": family} | changes).mixture)


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}, {1, 2, 4, 5, 6}),
        ("qwen3_moe", {"decoder_sparse_step": 3}, {2, 5}),
        ("llama4_text", {"interleave_moe_layer_step": 2}, {1, 3, 5}),
        ("llama4_text", {"moe_layers": [4]}, {4}),
        ("mimo_v2_flash", {}, {1, 2, 3, 4, 5, 6}),
        ("mimo_v2_flash", {"mlp_layer_types": ["sparse"] + ["dense"] * 6}, {0}),
        ("deepseek_v3", {"moe_layer_freq": 2}, {4, 6}),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] + ["dense"] * 6}, {0}),
    ],
)
def test_which_layers_have_experts(family: str, changes: dict[str, Any], layers: set[int]) -> None:
    assert mixture(family, **changes).layers == layers


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "mimo_v2_flash"])
def test_what_configs_of_experts_leave_out_is_transformers_default(family: str) -> None:
    left_out = ("attention_chunk_size", "v_head_dim", "model_type")
    sizes = {name: value for name, value in SPARSE.items() if name not in left_out}
    assert mixture(family) == mixture(family, **AutoConfig.for_model(family, **sizes).to_dict())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts per token are to be chosen from 8"),
        ("mixtral", {"num_experts_per_tok": 0}, "0 experts per token"),
        ("mixtral", {"num_local_experts": "many"}, "no size or number"),
        ("mimo_v2_flash", {"n_group": 4}, "n_group above 1"),
        ("deepseek_v3", {"n_group": 7}, "n_group 7 and topk_group 4 do not fit 256 experts, 8 per token"),
        ("deepseek_v3", {"topk_group": 9}, "n_group 8 and topk_group 9 do not fit"),
        ("kimi_k2", {"scoring_func": "softmax"}, "scoring_func 'softmax'.*supported are noaux_tc, sigmoid"),
        ("deepseek_v2", {"topk_method": "noaux_tc", "num_experts_per_tok": 6}, "supported are greedy or group_limited"),
        ("deepseek_v2", {"norm_topk_prob": True, "num_experts_per_tok": 6}, "norm_topk_prob True"),
    ],
)
def test_experts_that_cannot_be_are_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        mixture(family, **changes)


CPU = torch.device("cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 8.0, "original_max_position_embeddings": 512}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}

FORMS: dict[str, tuple[type, dict[str, Any]]] = {
    "default": (LlamaRotaryEmbedding, {"rope_theta": 5e5}),
    "linear by its old name": (LlamaRotaryEmbedding, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama3": (LlamaRotaryEmbedding, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "yarn by mscale": (
        LlamaRotaryEmbedding,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "yarn not truncated": (
        GptOssRotaryEmbedding,
        {"model_type": "gpt_oss", "sliding_window": 8, "rope_theta": 150_000.0}
        | {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
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
        {"model_type": "gemma4_text", "global_head_dim": 32}
        | {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": PROPORTIONAL}},
    ),
    "olmo3 as published": (
        Olmo3RotaryEmbedding,
        {"model_type": "olmo3", "sliding_window": 8, "rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
    ),
}


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_has_a_set_of_factors_for_long_sequences(kind: str) -> None:
    """Phi 3 names the kind otherwise in its first configs, and has the first length outside of the rope's parameters."""
    factors = {"short_factor": [1.0, 1.5] * 4, "long_factor": [2.0, 7.0] * 4}
    raw = SMALL | {"model_type": "phi3", "max_position_embeddings": 4096, "original_max_position_embeddings": 256}
    theirs = AutoConfig.for_model(**raw, rope_parameters=factors | {"rope_type": "longrope", "rope_theta": 1e4})
    rope = read_architecture(raw | {"rope_theta": 1e4, "rope_scaling": factors | {"type": kind}}).ropes[0]
    assert rope is not None
    for length in (256, 257):
        frequency, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, CPU, seq_len=length)
        torch.testing.assert_close(frequencies(rope.for_length(length), CPU), frequency, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(factor)


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
