"""Gated activations on GPUs: out[t, n] = activation(gate_up[t, n]) * gate_up[t, N + n], in float32; or relu(up[t, n]) ** 2.

Legend: T tokens, N inner width.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from transom_kernels.gated_mlp.op import Limits
from transom_kernels.launch import next_power_of_two
from transom_kernels.prepared_launch import PreparedLaunch
from transom_kernels.triton_math import gelu_tanh, relu2, silu

MOST_ELEMENTS = 2048  # most elements of a row that one program computes: 16 for each thread of 4 warps


def gated_activation_triton(gate_up: torch.Tensor, activation: str, limits: Limits | None = None) -> torch.Tensor:
    """Return `activation(gate) * up` [T, N], where `gate_up` [T, 2 N] has N gates, then N ups; with `relu2` it has N ups alone.

    With `limits` (g, u), gates are first clamped to at most g, and ups to [-u, u].
    """
    *leading, total = gate_up.shape
    width = total if activation == "relu2" else total // 2
    out = gate_up.new_empty(*leading, width)
    rows = gate_up if len(leading) == 1 else gate_up.reshape(-1, total)
    if num_rows := rows.shape[0]:
        launch, columns = _launch(rows.stride(0), width, activation, limits)
        launch((num_rows, columns, 1), (rows, out))
    return out


@cache
def _launch(stride: int, width: int, activation: str, limits: Limits | None) -> tuple[PreparedLaunch, int]:
    """Prepare the launch; return it and the number of programs for each row."""
    block = min(MOST_ELEMENTS, next_power_of_two(width))
    gate_limit, up_limit = limits or (0.0, 0.0)
    arguments = {"stride": stride, "N": width, "ACTIVATION": activation, "BLOCK_N": block}
    arguments |= {"gate_limit": gate_limit, "up_limit": up_limit, "LIMITED": limits is not None}
    return PreparedLaunch(activate, arguments, num_warps=4), -(-width // block)


@triton.jit
def activate(
    gate_up,
    out,
    stride,
    N,
    gate_limit,
    up_limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute `BLOCK_N` elements of one row. `gate_up` is [T, 2 N] or ups [T, N], `out` [T, N]; the grid (T, ceil(N / BLOCK_N))."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    gate = tl.load(gate_up + row * stride + n, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu2":
        value = relu2(gate)
    else:
        up = tl.load(gate_up + row * stride + N + n, mask=inside, other=0.0).to(tl.float32)
        if LIMITED:
            gate, up = tl.minimum(gate, gate_limit), tl.minimum(tl.maximum(up, -up_limit), up_limit)
        value = up * (gelu_tanh(gate) if ACTIVATION == "gelu_tanh" else silu(gate))
    tl.store(out + row * N + n, value.to(out.dtype.element_ty), mask=inside)
