"""What the families' tests against transformers do not ask of layers: other formats, memory, refusals, rounding."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from transom_core.errors import ConfigError
from transom_kernels.launch import prefer
from transom_kernels.moe import ExpertTensors, GateRule
from transom_worker.models.layers.experts import GroupedExperts, SequentialExperts, make_experts
from transom_worker.models.layers.linear import PlainLinear, make_linear
from transom_worker.models.layers.norm import RmsNorm
from transom_worker.models.layers.residual import Residual

HIDDEN, INNER, EXPERTS, CHOSEN = 24, 16, 7, 3
CLAMPED = GateRule(limits=(0.4, 0.4), gain=1.702, up_offset=1.0)
SHAPES = {
    "gate_up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER),
    "gate_up_bias": (EXPERTS, 2 * INNER), "down_bias": (EXPERTS, HIDDEN),
}  # fmt: skip


def make_weights(*parts: str, dtype: torch.dtype = torch.float32) -> ExpertTensors:
    tensors: dict[str, Any] = {name: torch.randn(SHAPES[name]).mul(0.3).to(dtype) for name in parts or SHAPES}
    return ExpertTensors(**tensors)


@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 30])
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("float32", "int8"), ("bfloat16", "int8")])
def test_experts_in_torch_and_in_8_bits_are_the_kernels(
    num_tokens: int, dtype: str, quantization: Any, scales_input: bool
) -> None:
    """Experts that run one after the other, against grouped products in float32."""
    weights, x = make_weights(dtype=getattr(torch, dtype)), torch.randn(num_tokens, HIDDEN).to(getattr(torch, dtype))
    routes = torch.rand(num_tokens, EXPERTS).topk(CHOSEN).indices, torch.rand(num_tokens, CHOSEN)
    with prefer("reference" if quantization == "none" else "auto"):
        experts = make_experts(weights, CLAMPED, quantization=quantization, scales_input=scales_input)
        got = experts(x, *routes).float()
    assert isinstance(experts, SequentialExperts)
    wide = replace(weights, **{name: getattr(weights, name).float() for name in SHAPES})
    wanted = make_experts(wide, CLAMPED, quantization="none", scales_input=scales_input)(x.float(), *routes)
    assert got.shape == x.shape
    assert (got - wanted).norm() <= (1e-5 if quantization == "none" else 0.03) * wanted.norm()


def test_weights_are_held_once() -> None:
    weights = make_weights("gate_up", "down")
    with prefer("reference"):
        experts = make_experts(weights, GateRule(), quantization="none")
    assert isinstance(experts, SequentialExperts)
    down = experts._down[3]
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    assert isinstance(down, PlainLinear)
    assert down.weight_NK.data_ptr() == weights.down[3].data_ptr()
    grouped = make_experts(weights, GateRule(), quantization="none")
    assert isinstance(grouped, GroupedExperts)
    assert experts.weight_bytes == grouped.weight_bytes == weights.gate_up.nbytes + weights.down.nbytes


def test_quantisation_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="float16"):
        make_linear(torch.zeros(4, 4, dtype=torch.float16), quantization="int8")
    with pytest.raises(ConfigError, match="on meta"):
        make_linear(torch.zeros(4, 4, device="meta"), quantization="int4")


def test_bfloat16_is_rounded_as_if_each_were_a_step_of_its_own() -> None:
    norm, inner = (RmsNorm(torch.rand(16).bfloat16() + 0.5, 1e-5) for _ in range(2))
    x, y = (torch.randn(70, 16).bfloat16() for _ in range(2))
    with prefer("reference"):
        residual = Residual(x)
        residual.add(y, inner)
        assert residual.read(norm).equal(norm(x + inner(y)))
