"""Families with experts against transformers' own, on small random checkpoints; and decode steps of all families, recorded in
bfloat16 as kernels alone.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint, prompt
from tests.engine_driver import make_engine, make_request, run
from tests.matrices import some_daily
from tests.worker.models.deepseek_v4_checkpoint import make_deepseek_v4
from tests.worker.models.family_tests import Family, FamilyCase, FamilyTests, by_name, each
from tests.worker.models.quantised_checkpoints import to_fp8, to_fp8_stacks, to_mxfp4
from tests.worker.models.test_dense_families import (
    CASES as DENSE,
    DELTA_NET,
    GRANITE,
    MAMBA,
    MLA,
    NEMOTRON,
    YARN as DENSE_YARN,
)
from transom_kernels.cpu.program import Program, record_program
from transom_kernels.launch import has_cpu_kernels
from transom_worker.models.registry import FAMILIES

YARN = DENSE_YARN | {"rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 8.0, "original_max_position_embeddings": 256}
MIMO_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.334}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}
GROUPS = {"n_group": 4, "topk_group": 2}
DEEPSEEK = MLA | EXPERTS | GROUPS
SIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SHARED = SIX | {"shared_expert_intermediate_size": 80}
# The factor of queries changes within the tests' sequences.
MISTRAL4_ROPE = YARN | {
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 0.4,
}
STEP_ROPES = {
    "full_attention": {
        **{"rope_type": "llama3", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "factor": 4.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 80}
STRETCHED = YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}
INDEXED = MLA | EXPERTS | {"index_n_heads": 17, "index_head_dim": 20, "index_topk": 40, "first_k_dense_replace": 1}
KIMI = {
    **{"kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"linear_num_heads": 3, "linear_head_dim": 20, "linear_conv_kernel_dim": 3, "num_key_value_heads": 4},
    **{"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"rms_norm_eps": 1e-3, "pad_token_id": 0},
}
_CASES = {
    "deepseek_v2": FamilyCase(
        DEEPSEEK
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0}
        | {"first_k_dense_replace": 1, "rope_parameters": STRETCHED},
        each(topk_method="greedy", rope_parameters=STRETCHED | {"mscale_all_dim": 0.7}),
    ),
    "deepseek_v3": FamilyCase(
        DEEPSEEK | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "rope_parameters": STRETCHED},
        each(topk_group=1, rope_interleave=False, routed_scaling_factor=1.0),
    ),
    "deepseek_v32": FamilyCase(
        INDEXED | GROUPS | {"routed_scaling_factor": 1.5, "rope_parameters": STRETCHED, "seed": 11},
        each(index_topk=39, topk_group=1) + each(index_topk=2000),
    ),
    "glm_moe_dsa": FamilyCase(
        INDEXED
        | {"indexer_types": ["full", "shared", "full", "shared"], "index_topk": 48, "n_group": 1, "topk_group": 1}
        | {"rms_norm_eps": 1e-3, "num_attention_heads": 20, "num_key_value_heads": 20, "seed": 2},
        each(indexer_types=["full", "shared", "shared", "shared"], rms_norm_eps=1e-1),
    ),
    "kimi_linear": FamilyCase(
        KIMI | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
        each(norm_topk_prob=False, routed_scaling_factor=1.0, rms_norm_eps=1e-1),
    ),
    "bailing_hybrid": FamilyCase(
        KIMI
        | GROUPS
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
        | {"head_dim": 16, "qk_rope_head_dim": 16, "short_conv_kernel_size": 3, "first_k_dense_replace": 1, "seed": 1},
        each(kda_safe_gate=False, kda_lower_bound=-1.0, topk_group=1, routed_scaling_factor=1.0),
    ),
    "kimi_k2": FamilyCase(
        MLA | EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.8},
        each(norm_topk_prob=False),
    ),
    "glm4_moe_lite": FamilyCase(
        # 20 heads, as published: more than share a KV head
        MLA | EXPERTS | {"rms_norm_eps": 1e-3, "num_attention_heads": 20, "num_key_value_heads": 20, "seed": 1},
        each(rms_norm_eps=1e-1, norm_topk_prob=False),
    ),
    "mixtral": FamilyCase({"num_local_experts": 6, "num_experts_per_tok": 2, "seed": 3}, each(num_experts_per_tok=1)),
    "qwen3_next": FamilyCase(
        DELTA_NET | SHARED | {"mlp_only_layers": [1]}, each(norm_topk_prob=False, rope_parameters=MIMO_ROPE)
    ),
    "qwen3_5_moe": FamilyCase(DELTA_NET | SHARED | {"seed": 1}, each(num_experts_per_tok=3), family="qwen3_5_moe_text"),
    "granite4 with experts": FamilyCase(
        MAMBA
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "seed": 4}
        | {"mamba_n_groups": 2, "mamba_conv_bias": False, "position_embedding_type": "rope"},
        each(num_experts_per_tok=3, position_embedding_type="nope"),
        family="granitemoehybrid",
    ),
    "jamba": FamilyCase(
        # four heads of channels, which three ranks share unevenly
        dict(attn_layer_period=3, attn_layer_offset=1, num_experts=6, num_experts_per_tok=2, mamba_expand=4)
        | {"mamba_d_state": 12, "mamba_d_conv": 3, "mamba_dt_rank": 24, "rms_norm_eps": 1e-3, "num_hidden_layers": 5},
        each(num_experts_per_tok=3, rms_norm_eps=1e-1),
    ),
    "nemotron_h with experts": FamilyCase(
        NEMOTRON
        | {"hybrid_override_pattern": "MEM*E*-ME", "moe_intermediate_size": 40, "mlp_bias": True}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
        | {"moe_shared_expert_intermediate_size": 48, "moe_latent_size": 56, "use_conv_bias": False, "seed": 2},
        each(norm_topk_prob=False, topk_group=1, routed_scaling_factor=1.0),
    ),
    "qwen2_moe": FamilyCase(SHARED | {"mlp_only_layers": [0]}, each(norm_topk_prob=True)),
    "glm4_moe": FamilyCase(
        EXPERTS
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2}
        | {"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
        each(routed_scaling_factor=1.0, norm_topk_prob=False),
    ),
    "lfm2_moe": FamilyCase(
        SIX
        | {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"], "num_hidden_layers": 5}
        | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
        each(routed_scaling_factor=1.0, norm_topk_prob=False),
    ),
    "olmoe": FamilyCase({"num_experts": 6, "num_experts_per_tok": 2, "seed": 1}, each(norm_topk_prob=True)),
    "mellum": FamilyCase(
        EIGHT
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 20}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        each(sliding_window=21, norm_topk_prob=False),
    ),
    "dots1": FamilyCase(
        EXPERTS
        | GROUPS
        | {"scoring_func": "noaux_tc", "sliding_window": 20, "max_window_layers": 2, "norm_topk_prob": True},
        each(sliding_window=21, topk_group=1),
    ),
    "mistral4": FamilyCase(
        MLA | EXPERTS | {"head_dim": 20, "first_k_dense_replace": 1, "rope_parameters": MISTRAL4_ROPE, "seed": 2},
        each(rope_parameters=MISTRAL4_ROPE | {"llama_4_scaling_beta": 0.0}, norm_topk_prob=False),
    ),
    "flint": FamilyCase(
        EIGHT
        | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [0], "sliding_window": 20}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
        each(sliding_window=21, norm_topk_prob=False),
    ),
    "step3p5": FamilyCase(
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
        | {
            "share_expert_dim": 40,
            "moe_router_scaling_factor": 1.7,
            "sliding_window": 20,
            "rope_parameters": STEP_ROPES,
        }
        | {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]}
        | {"num_sliding_attention_heads": 6, "mlp_layer_types": ["dense", *["sparse"] * 3]}
        | {"swiglu_limits": [0.0, 0.3, None, 0.5], "swiglu_limits_shared": [0.4, 0.0, 0.3, 0.5]},
        each(sliding_window=21, moe_router_scaling_factor=1.0, swiglu_limits=None, swiglu_limits_shared=None),
    ),
    "hy_v3": FamilyCase(EIGHT | {"router_scaling_factor": 1.7}, each(router_scaling_factor=1.0)),
    "ernie4_5_moe": FamilyCase(
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_layer_interval": 2},
        each(moe_k=2, moe_norm_min=1.0),
    ),
    "solar_open": FamilyCase(EXPERTS | {"routed_scaling_factor": 1.5}, each(routed_scaling_factor=1.0)),
    "exaone_moe": FamilyCase(
        EIGHT
        | {"num_shared_experts": 1, "sliding_window": 20, "sliding_window_pattern": 2, "seed": 1}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        each(sliding_window=21, routed_scaling_factor=1.0, num_experts_per_tok=2),
    ),
    "afmoe": FamilyCase(
        EIGHT
        | {"num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.7, "mup_enabled": True}
        | {"sliding_window": 20, "global_attn_every_n_layers": 2},
        each(sliding_window=21, route_scale=1.0, mup_enabled=False),
    ),
    "granitemoe": FamilyCase(GRANITE | {"num_local_experts": 6}, each(num_experts_per_tok=3, residual_multiplier=1.0)),
    "granitemoeshared": FamilyCase(
        GRANITE | {"num_local_experts": 6, "shared_intermediate_size": 80},
        each(num_experts_per_tok=3, attention_multiplier=0.2),
    ),
    "granitemoe_swa": FamilyCase(
        GRANITE | {"num_local_experts": 6, "shared_intermediate_size": 80, "sliding_window": 20},
        each(sliding_window=21, layer_rope_theta=[0, *[10_000.0] * 3]),
    ),
    "minimax_m2": FamilyCase(
        {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8, "seed": 1}, each(num_experts_per_tok=1)
    ),
    "qwen3_moe": FamilyCase(EIGHT | {"mlp_only_layers": [1], "norm_topk_prob": True}, each(norm_topk_prob=False)),
    "qwen3_moe as it is": FamilyCase(
        EIGHT | {"decoder_sparse_step": 2, "attention_bias": True, "seed": 8}, each(norm_topk_prob=True)
    ),
    "gpt_oss": FamilyCase(
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 16, "swiglu_limit": 1.5}
        | {"rope_parameters": YARN | {"truncate": False}},
        each(sliding_window=17, swiglu_limit=2.0, swiglu_alpha=1.0, rope_parameters=YARN | {"truncate": True}),
    ),
    "llama4": FamilyCase(
        LLAMA4
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 32, "no_rope_layer_interval": 4}
        | {"floor_scale": 64, "attn_scale": 0.5, "seed": 5},
        each(attention_chunk_size=31, attn_temperature_tuning=False, floor_scale=63, use_qk_norm=False),
        family="llama4_text",
    ),
    "llama4 without norms": FamilyCase(
        LLAMA4
        | {"num_experts_per_tok": 2, "attention_chunk_size": 16, "no_rope_layers": [1, 0, 1, 0]}
        | {"use_qk_norm": False, "attn_temperature_tuning": False},
        each(attention_chunk_size=17),
        family="llama4_text",
    ),
    "mimo_v2_flash": FamilyCase(
        {"num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16, "sliding_window": 17}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5},
        each(sliding_window=18, attention_value_scale=1.0, routed_scaling_factor=1.0)
        + each(rope_parameters={kind: MIMO_ROPE for kind in ("full_attention", "sliding_attention")}),
    ),
}
CASES = by_name(_CASES)
DEEPSEEK_V4 = FamilyCase(
    family="deepseek_v4",
    mistakes=each(sliding_window=15, index_topk=4, hc_sinkhorn_iters=1, swiglu_limit=2.5),
    records=False,  # what its compressed layers read in a step is chosen with the host's help
)
QUANTISED: dict[str, Callable[[Path, Path], None]] = {
    "gpt_oss in MXFP4": to_mxfp4,
    "qwen3_moe as it is in fp8": to_fp8,
    "deepseek_v3 in fp8": to_fp8,
    "qwen3_moe as it is in fp8 stacks": to_fp8_stacks,
    "deepseek_v3 in fp8 stacks, input first": partial(to_fp8_stacks, input_first=True),
}


ALL_CASES = DENSE | CASES


# These differ from others in what `Architecture` says, or have parts of several.
RARELY = (
    *("qwen3_moe as it is in fp8 stacks", "deepseek_v3 in fp8 stacks, input first"),
    *("olmoe", "hy_v3", "dots1", "mellum", "solar_open", "exaone_moe", "ernie4_5_moe", "flint"),
    *("granitemoe", "granitemoeshared", "granitemoe_swa"),
)
ALL = [*CASES, *QUANTISED, "deepseek_v4"]


@pytest.fixture(scope="module", params=some_daily(ALL, daily=[name for name in ALL if name not in RARELY]))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), request.param)


def make_family(folder: Path, name: str) -> Family:
    """Of one of `ALL_CASES`, of one of `QUANTISED` or of DeepSeek V4."""
    if name == "deepseek_v4":
        return Family.of(make_deepseek_v4(folder), DEEPSEEK_V4)
    made = make_folder(folder, name, ALL_CASES)
    return Family.of(folder / "plain", ALL_CASES[name.split(" in ")[0]], made)


def make_folder(folder: Path, name: str, cases: dict[str, FamilyCase]) -> Path:
    """The checkpoint of a case; of one in a quantised format the plain checkpoint lies beside it."""
    case = cases[name.split(" in ")[0]]
    plain = make_checkpoint(folder / "plain", case.family, **case.config)
    if name in QUANTISED:
        QUANTISED[name](plain, folder / "packed")
        return folder / "packed"
    draw_corrections(plain)
    return plain


def draw_corrections(folder: Path) -> None:
    """Routers' corrections are no parameters, and so zero in a new model; here they change some choices."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("e_score_correction_bias", "expert_bias", "router_bias"))]:
        drawn = torch.linspace(-0.3, 0.3, tensors[name].numel()).roll(sum(map(ord, name)))
        tensors[name] = drawn.view_as(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class TestMoeFamilies(FamilyTests):
    """All of `FamilyTests`, by family."""


# --- recorded decode steps, of dense families, too


@pytest.mark.skipif(not has_cpu_kernels(), reason="this processor has no kernels")
@pytest.mark.parametrize("name", some_daily(ALL_CASES, daily=["gemma4", "cohere2", "llama4"]))
def test_no_torch_operator_in_a_recorded_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In the programs that an engine records for one request: for one row, and for three where the prompt is split."""
    programs: list[Program] = []

    def recording(*args: Any) -> Any:
        program, logits = record_program(*args)
        programs.append(program)
        return program, logits

    monkeypatch.setattr("transom_worker.execution.replay.decode_programs.record_program", recording)
    make_checkpoint(tmp_path, ALL_CASES[name].family, **ALL_CASES[name].config)
    engine = make_engine(str(tmp_path), dtype="bfloat16", max_model_len=64)
    run(engine, [make_request("one", prompt(3), max_tokens=4)])
    engine.shutdown()
    assert programs
    assert all(program.num_instructions > 0 and program.num_calls == 0 for program in programs)


def test_every_family_is_asked_whether_it_records() -> None:
    """DeepSeek V4 does not record."""
    assert {case.family for case in ALL_CASES.values()} == set(FAMILIES) - {"deepseek_v4"}
