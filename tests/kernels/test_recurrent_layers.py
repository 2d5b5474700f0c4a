"""`linear_recurrence` and `gated_rms_norm` make up recurrent layers, as transformers has them, in float32 and float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import FalconH1Config, GraniteMoeHybridConfig, NemotronHConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tests.kernels.test_linear_recurrence import batch_of, step_of
from transom_kernels.launch import prefer
from transom_kernels.linear_recurrence import RecurrenceInputs, gated_rms_norm, linear_recurrence

WIDTH, TOKENS = 48, 75
Layer = Any

DELTA_NET = {
    "hidden_size": WIDTH, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "num_hidden_layers": 4,
}  # fmt: skip
FALCON = {
    "hidden_size": WIDTH, "num_hidden_layers": 1, "mamba_d_ssm": 80, "mamba_n_heads": 8, "mamba_d_head": 10, "mamba_n_groups": 2,
    "mamba_d_state": 12, "ssm_multipliers": [0.7, 1.2, 0.4, 0.9, 1.5], "ssm_in_multiplier": 1.3,
}  # fmt: skip


def falcon(**options: Any) -> Layer:
    config = FalconH1Config(**FALCON, **options)
    layer = FalconH1Mixer(config, 0)
    layer.mup_vector = compute_mup_vector(config)
    return layer


LAYERS: dict[str, Callable[[], Layer]] = {
    "Qwen3-Next": lambda: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**DELTA_NET), 0),
    "Qwen 3.5": lambda: Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**DELTA_NET), 0),
    "Granite 4": lambda: GraniteMoeHybridMambaLayer(
        GraniteMoeHybridConfig(
            hidden_size=WIDTH, layer_types=["mamba"], num_hidden_layers=1, mamba_n_heads=8, mamba_d_head=12,
            mamba_d_state=16, mamba_n_groups=1,
        ), 0
    ),
    "Nemotron-H": lambda: NemotronHMamba2Mixer(
        NemotronHConfig(
            hidden_size=WIDTH, mamba_num_heads=8, mamba_head_dim=6, ssm_state_size=20, n_groups=4, time_step_min=0.3,
        ), 0
    ),
    "Falcon-H1": lambda: falcon(mamba_rms_norm=False),
    "Falcon-H1, norm first": lambda: falcon(mamba_rms_norm=True, mamba_norm_before_gate=True),
    "Falcon-H1, gate first": lambda: falcon(mamba_rms_norm=True, mamba_norm_before_gate=False),
}  # fmt: skip


def delta_net(layer: Layer, x: torch.Tensor) -> tuple[RecurrenceInputs, torch.Tensor, dict[str, Any]]:
    """The inputs of a whole prompt, the gate and the arguments of the norm."""
    if isinstance(layer, Qwen3NextGatedDeltaNet):
        parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x)[None], layer.in_proj_ba(x)[None])
        query, key, value, gate, b, a = (part[0].flatten(1) for part in parts)
        projected = torch.cat([query, key, value], dim=1)
    else:
        projections = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
        projected, gate, b, a = (project(x) for project in projections)
    state = torch.full((5, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim), float("nan"))
    inputs = inputs_of(layer, projected, a, state, key_heads=layer.num_k_heads, strength=b)
    return inputs, gate, {"weight": layer.norm.weight, "eps": layer.norm.variance_epsilon, "group": layer.head_v_dim}


def mamba(layer: Layer, x: torch.Tensor) -> tuple[RecurrenceInputs, torch.Tensor, dict[str, Any]]:
    """The inputs of a whole prompt, the gate and the arguments of the norm. C comes first here, then B and x."""
    inner, groups = layer.intermediate_size, layer.n_groups
    projected = layer.in_proj(x * getattr(layer, "ssm_in_multiplier", 1.0)) * getattr(layer, "mup_vector", 1.0)
    projected = projected.view(len(x), -1)
    gate, mixed, step = torch.split(projected, [inner, layer.conv_dim, layer.num_heads], dim=1)
    inputs = inputs_of(
        layer,
        mixed,
        step,
        torch.full((5, layer.num_heads, layer.ssm_state_size, layer.head_dim), float("nan")),
        key_heads=groups,
        skip=layer.D,
        step_limits=tuple(layer.time_step_limit),
    )
    state = groups * layer.ssm_state_size
    value, key, query = torch.split(torch.arange(layer.conv_dim), [inner, state, state])
    order = torch.cat([query, key, value])
    bias = None if inputs.bias is None else inputs.bias[order]
    inputs = replace(inputs, projected=mixed[:, order], weight=inputs.weight[:, order], bias=bias)
    if not getattr(layer, "mamba_rms_norm", True):
        return inputs, gate, {"weight": None, "eps": 0.0}
    norm = {"weight": layer.norm.weight, "eps": layer.norm.variance_epsilon, "group": inner // groups}
    return inputs, gate, norm | {"gates_first": not getattr(layer.norm, "norm_before_gate", False)}


def inputs_of(
    layer: Layer, projected: torch.Tensor, step_size: torch.Tensor, state: torch.Tensor, **options: Any
) -> RecurrenceInputs:
    weight = layer.conv1d.weight[:, 0].T.contiguous()
    return RecurrenceInputs(
        projected=projected,
        weight=weight,
        bias=layer.conv1d.bias,
        step_size=step_size,
        step_bias=layer.dt_bias,
        log_rate=layer.A_log,
        state=state,
        rows=torch.full((5, len(weight) - 1, projected.shape[1]), float("nan")),
        batch=batch_of([len(projected)]),
        **options,
    )


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_in_steps_equals_transformers(name: str, kernels: Any) -> None:
    """A prompt in two chunks, then single tokens."""
    layer, x = LAYERS[name](), torch.randn(TOKENS, WIDTH)
    for parameter in layer.parameters():
        parameter.add_(torch.randn_like(parameter) / 8)
    case, gate, norm = (delta_net if hasattr(layer, "in_proj_a") or hasattr(layer, "in_proj_ba") else mamba)(layer, x)
    with prefer(kernels):
        ends = [33, 70, *range(71, TOKENS + 1)]
        steps = [step_of(case, [a], [b], in_place=True) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        results = torch.cat([linear_recurrence(step) for step in steps])
        got = layer.out_proj(gated_rms_norm(results, gate, **norm))
    torch.testing.assert_close(got, layer(x[None])[0], atol=2e-5, rtol=2e-5)
    wide = layer.double()(x[None].double())[0]
    torch.testing.assert_close(got.double(), wide, atol=2e-5, rtol=2e-5)
