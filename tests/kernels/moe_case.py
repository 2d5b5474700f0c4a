"""Random experts and routes, and the tests that the experts' CPU and Triton kernels share.

A test module inherits `MoeTests` and gives the fixture `kernel`, which is called as `moe_reference` is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.matrices import matrix
from transom_kernels.moe import ExpertTensors, GateRule, MxTensor
from transom_kernels.moe.op import moe_reference

PLAIN, GPT_OSS = GateRule(), GateRule(gain=1.702, limit=1.5, up_offset=1.0)
RULES = {"silu": PLAIN, "gpt-oss": GPT_OSS, "gelu": GateRule(activation="gelu_tanh")}
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
Kernel = Callable[..., torch.Tensor]
Routes = tuple[torch.Tensor, torch.Tensor]


def plain_experts(experts: int, inner: int, width: int, dtype: torch.dtype = torch.float32) -> ExpertTensors:
    return ExpertTensors(
        gate_up=(torch.randn(experts, 2 * inner, width) / 4).to(dtype),
        down=(torch.randn(experts, width, inner) / 4).to(dtype),
    )


def biased(tensors: ExpertTensors, dtype: torch.dtype, *, interleaved: bool) -> ExpertTensors:
    (experts, double, width) = tensors.gate_up.shape
    biases = torch.randn(experts, double).to(dtype), torch.randn(experts, width).to(dtype)
    return replace(tensors, gate_up_bias=biases[0], down_bias=biases[1], interleaved=interleaved)


def mx_experts(experts: int, inner: int, width: int) -> ExpertTensors:
    return ExpertTensors(gate_up=_mx_tensor(experts, 2 * inner, width), down=_mx_tensor(experts, width, inner))


def _mx_tensor(experts: int, rows: int, columns: int) -> MxTensor:
    return MxTensor(
        blocks=torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8),
        scales=torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8),
    )


def routes(tokens: int, chosen: int, experts: int) -> Routes:
    return torch.rand(tokens, experts).topk(chosen).indices, torch.rand(tokens, chosen)


def check_moe(
    kernel: Kernel, x: torch.Tensor, chosen: Routes, tensors: ExpertTensors, rule: GateRule, *, scales_input: bool = False
) -> None:  # fmt: skip
    """Memory is NaN before."""
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        got = kernel(x, *chosen, tensors, rule, scales_input=scales_input)
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = moe_reference(x, *chosen, tensors, rule, scales_input=scales_input)
    limit = LIMITS[x.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=limit, rtol=limit)


class MoeTests:
    """Sizes, rules, biases and weights of 4 bits, against the reference."""

    @pytest.mark.parametrize(
        ("rule", "sizes", "scales_input"),
        matrix(
            list(RULES),
            [
                (0, 2, 1, 8, 8),
                (1, 4, 2, 20, 36),
                (1, 1, 1, 1, 2),
                (9, 3, 1, 31, 65),
                (20, 2, 2, 33, 63),
                (5, 17, 3, 32, 64),
            ],
            [False, True],
        ),
    )
    def test_sizes(
        self, kernel: Kernel, dtype: torch.dtype, rule: str, sizes: tuple[int, ...], scales_input: bool
    ) -> None:
        tokens, experts, chosen, inner, width = sizes
        x, tensors = torch.randn(tokens, width).to(dtype), plain_experts(experts, inner, width, dtype)
        check_moe(kernel, x, routes(tokens, chosen, experts), tensors, RULES[rule], scales_input=scales_input)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_biases_clamps_and_alternating_rows(self, kernel: Kernel, dtype: torch.dtype, interleaved: bool) -> None:
        tensors = biased(plain_experts(3, 20, 36, dtype), dtype, interleaved=interleaved)
        check_moe(kernel, torch.randn(7, 36).to(dtype), routes(7, 2, 3), tensors, GPT_OSS)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_mxfp4_as_stored(self, kernel: Kernel, dtype: torch.dtype, interleaved: bool) -> None:
        tensors = biased(mx_experts(4, 64, 96), torch.float32, interleaved=interleaved)
        for tokens in (1, 8):
            check_moe(kernel, torch.randn(tokens, 96).to(dtype), routes(tokens, 2, 4), tensors, GPT_OSS)
