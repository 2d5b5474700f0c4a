"""The experts' CPU kernels against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.moe_case import (
    GPT_OSS,
    PLAIN,
    Kernel,
    MoeTests,
    biased,
    check_moe,
    mx_experts,
    plain_experts,
    routes,
)
from transom_kernels.moe import ExpertTensors, MxTensor, cpu, moe, pack_experts


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
    scales = torch.tensor([0, 1, 126, 127, 128, 251], dtype=torch.uint8).view(1, 1, 6).repeat(1, 64, 1)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 256).repeat(1, 64, 1)[..., :96]
    down = MxTensor(blocks=(blocks + torch.arange(64, dtype=torch.uint8).view(1, 64, 1) * 16), scales=scales)
    gate_up = torch.zeros(1, 384, 64)
    gate_up[0, :192] = 1  # the gates of all tokens are 40, and so is each token's own up
    gate_up[0, 192:] = torch.eye(192, 64)
    tensors = ExpertTensors(gate_up=gate_up, down=down)
    packed = pack_experts(tensors)
    x = torch.eye(64) * 40
    got = moe(x, torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, 1), packed, PLAIN)
    wanted = down.dequantised()[0].T[:64] * 1600
    torch.testing.assert_close(got, wanted, atol=0, rtol=1e-6)


def test_tokens_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x, (which, weights) = (
        pack_experts(plain_experts(4, 20, 36, torch.float32)),
        torch.randn(40, 36),
        routes(40, 2, 4),
    )
    whole = moe(x, which, weights, packed, GPT_OSS)
    monkeypatch.setattr(cpu, "MAX_PAIRS", 26)
    assert torch.equal(moe(x, which, weights, packed, GPT_OSS), whole)


def test_what_does_not_fit_is_refused() -> None:
    packed, (which, weights) = pack_experts(plain_experts(2, 20, 36, torch.float32)), routes(3, 1, 2)
    with pytest.raises(ValueError, match=r"give \[T, 36\]"):
        moe(torch.zeros(3, 35), which, weights, packed, PLAIN)
    with pytest.raises(ValueError, match="bfloat16 does not fit"):
        moe(torch.zeros(3, 36).bfloat16(), which, weights, packed, PLAIN)
    with pytest.raises(ValueError, match="4 tokens"):
        moe(torch.zeros(4, 36), which, weights, packed, PLAIN)
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
