"""The experts' CPU kernels against the reference, and the tests that they share with the Triton kernels.

A test module inherits `MoeTests` and gives the fixture `kernel`, which is called as `moe_reference` is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.conftest import nan_memory
from tests.matrices import matrix
from transom_kernels.moe import ExpertTensors, GateRule, MxTensor, cpu, moe, pack_experts
from transom_kernels.moe.op import moe_reference

PLAIN, GPT_OSS = GateRule(), GateRule(gain=1.702, limits=(1.5, 1.5), up_offset=1.0)
RELU2 = GateRule(activation="relu2")
RULES = {"silu": PLAIN, "gpt-oss": GPT_OSS, "gelu": GateRule(activation="gelu_tanh"), "relu2": RELU2}
RULES["step3p5"] = GateRule(limits=(0.8, 0.5))
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
Kernel = Callable[..., torch.Tensor]
Routes = tuple[torch.Tensor, torch.Tensor]


def plain_experts(experts: int, inner: int, width: int, dtype: torch.dtype = torch.float32) -> ExpertTensors:
    return ExpertTensors(
        gate_up=(torch.randn(experts, 2 * inner, width) / 4).to(dtype),
        down=(torch.randn(experts, width, inner) / 4).to(dtype),
    )


def without_gates(tensors: ExpertTensors) -> ExpertTensors:
    """With every second row alone, so that alternating gates and ups count, too."""
    rows, bias = tensors.gate_up, tensors.gate_up_bias
    if isinstance(rows, MxTensor):
        ups: Any = MxTensor(blocks=rows.blocks[:, ::2].contiguous(), scales=rows.scales[:, ::2].contiguous())
    else:
        assert isinstance(rows, torch.Tensor)
        ups = rows[:, ::2].contiguous()
    return replace(tensors, gate_up=ups, gate_up_bias=None if bias is None else bias[:, ::2].contiguous())


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
    with nan_memory():
        got = kernel(x, *chosen, tensors, rule, scales_input=scales_input)
    wanted = moe_reference(x, *chosen, tensors, rule, scales_input=scales_input)
    limit = LIMITS[x.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), atol=limit, rtol=limit)


def check_mx(kernel: Kernel, exponents: list[int]) -> None:
    """Every value of MXFP4 with each of six scales."""
    scales = torch.tensor(exponents, dtype=torch.uint8).view(1, 1, 6).repeat(1, 64, 1)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 256).repeat(1, 64, 1)[..., :96]
    down = MxTensor(blocks=(blocks + torch.arange(64, dtype=torch.uint8).view(1, 64, 1) * 16), scales=scales)
    gate_up = torch.zeros(1, 384, 64)
    gate_up[0, :192] = 1  # the gates of all tokens are 40, and so is each token's own up
    gate_up[0, 192:] = torch.eye(192, 64)
    tensors, x = ExpertTensors(gate_up=gate_up, down=down), torch.eye(64) * 40
    got = kernel(x, torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, 1), tensors, PLAIN)
    torch.testing.assert_close(got, down.dequantised()[0].T[:64] * 1600, atol=0, rtol=1e-6)


class MoeTests:
    """Sizes, rules, biases and weights of 4 bits, against the reference."""

    @pytest.mark.parametrize(
        ("rule", "sizes", "scales_input"),
        matrix(
            list(RULES),
            [
                (0, 2, 1, 8, 8), (1, 4, 2, 20, 36), (1, 1, 1, 1, 2), (9, 3, 1, 31, 65), (20, 2, 2, 33, 63),
                (5, 17, 3, 32, 64),
            ],
            [False, True],
        ),
    )  # fmt: skip
    def test_sizes(
        self, kernel: Kernel, dtype: torch.dtype, rule: str, sizes: tuple[int, ...], scales_input: bool
    ) -> None:
        tokens, experts, chosen, inner, width = sizes
        x, tensors = torch.randn(tokens, width), plain_experts(experts, inner, width, dtype)
        if not RULES[rule].has_gates:  # squares, whose rounding grows with them
            x, tensors = x / 2, without_gates(tensors)
        x = x.to(dtype)
        check_moe(kernel, x, routes(tokens, chosen, experts), tensors, RULES[rule], scales_input=scales_input)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_biases_clamps_and_alternating_rows(self, kernel: Kernel, dtype: torch.dtype, interleaved: bool) -> None:
        tensors = biased(plain_experts(3, 20, 36, dtype), dtype, interleaved=interleaved)
        x, chosen = torch.randn(7, 36).to(dtype), routes(7, 2, 3)
        check_moe(kernel, x, chosen, tensors, GPT_OSS)
        check_moe(kernel, x, chosen, without_gates(tensors), RELU2)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_mxfp4_as_stored(self, kernel: Kernel, dtype: torch.dtype, interleaved: bool) -> None:
        tensors = biased(mx_experts(4, 64, 96), torch.float32, interleaved=interleaved)
        for tokens in (1, 8):
            check_moe(kernel, torch.randn(tokens, 96).to(dtype), routes(tokens, 2, 4), tensors, GPT_OSS)
        check_moe(kernel, torch.randn(8, 96).to(dtype) / 4, routes(8, 2, 4), without_gates(tensors), RELU2)


def moe_cpu(
    x: torch.Tensor, which: torch.Tensor, weights: torch.Tensor, tensors: ExpertTensors, *rule: Any, **how: Any
):
    return moe(x, which, weights, pack_experts(tensors), *rule, **how)


@pytest.fixture
def kernel() -> Kernel:
    return moe_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestMoe(MoeTests):
    """All of `MoeTests`."""


def test_mxfp4_values_and_scales() -> None:
    """Every value, with the smallest scale, ones between, and the largest one that float32 can hold times 6."""
    check_mx(moe_cpu, [0, 1, 126, 127, 128, 251])


def test_tokens_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = pack_experts(plain_experts(4, 20, 36, torch.float32)), torch.randn(40, 36)
    which, weights = routes(40, 2, 4)
    whole = moe(x, which, weights, packed, GPT_OSS)
    monkeypatch.setattr(cpu, "MAX_PAIRS", 26)
    assert torch.equal(moe(x, which, weights, packed, GPT_OSS), whole)


def test_what_does_not_fit_is_refused() -> None:
    tensors, (which, weights) = plain_experts(2, 20, 36), routes(3, 1, 2)
    packed = pack_experts(tensors)
    with pytest.raises(ValueError, match=r"give \[E, 2I, N\]"):
        moe(torch.zeros(3, 35), which, weights, tensors, PLAIN)
    with pytest.raises(ValueError, match=r"give \[T, 36\]"):
        moe(torch.zeros(3, 35), which, weights, packed, PLAIN)
    with pytest.raises(ValueError, match="bfloat16 does not fit"):
        moe(torch.zeros(3, 36).bfloat16(), which, weights, packed, PLAIN)
    with pytest.raises(ValueError, match="4 tokens"):
        moe(torch.zeros(4, 36), which, weights, packed, PLAIN)
    with pytest.raises(ValueError, match="relu2 does not fit packed experts"):
        moe(torch.zeros(3, 36), which, weights, packed, RELU2)
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_experts(plain_experts(2, 20, 36, torch.float16))


def small_case() -> None:
    """An expert with more rows than a tile of AMX has, and few rows."""
    tensors = biased(plain_experts(2, 20, 36, torch.bfloat16), torch.bfloat16, interleaved=False)
    for tokens in (2, 40):
        check_moe(
            moe_cpu, torch.randn(tokens, 36).bfloat16(), routes(tokens, 1, 2), tensors, GPT_OSS, scales_input=True
        )
    check_moe(moe_cpu, torch.randn(7, 96).bfloat16(), routes(7, 2, 4), mx_experts(4, 32, 96), GPT_OSS)
