"""Launches of an MoE layer: sort pairs into row blocks, matmul into the experts, matmul out of them, sum over each token's experts.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token, P = T K pairs of token and expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from transom_kernels.launch import INTERPRETED, next_power_of_two
from transom_kernels.moe.kernel import into_experts, out_of_experts, sum_experts
from transom_kernels.moe.row_blocks import MAX_PAIRS, block_rows, block_rows_triton
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor

SUM_COLUMNS = 1024  # of a program of `sum_experts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile of a grouped matmul: rows, columns and inner elements of an iteration; warps and pipeline stages."""

    block_m: int
    block_n: int
    block_j: int
    num_warps: int
    num_stages: int


# few rows: the time goes into reading weights
SMALL = Tile(block_m=16, block_n=64, block_j=128, num_warps=4, num_stages=3)
MIDDLE = Tile(block_m=64, block_n=64, block_j=64, num_warps=4, num_stages=3)
LARGE = Tile(block_m=128, block_n=64, block_j=64, num_warps=8, num_stages=3)
TILES = (SMALL, MIDDLE, LARGE)
MXFP4_TILES = (  # MXFP4 weights are dequantised in registers, which more warps must share
    replace(SMALL, num_warps=8),  # with four warps Triton 3.6 spills registers
    replace(MIDDLE, block_n=32, num_warps=8),
    replace(LARGE, block_n=32),
)
FLOAT32_TILE = replace(SMALL, block_n=32, block_j=32, num_stages=2)  # float32, without tensor cores


def moe_triton(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tensors: ExpertTensors,
    rule: GateRule,
    *,
    scales_input: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, N] in the dtype of `x`.

    `x` [T, N]: hidden states. `experts` [T, K] and `weights` [T, K]: each token's experts and their routing weights. `tensors`: the
    matrices and biases of the experts. `rule`: the gated activation between the two matrices. With `scales_input` the routing
    weight multiplies an expert's input (Llama 4), else its output. `op.moe` has checked shapes and dtypes.
    """
    (tokens, width), chosen = x.shape, experts.shape[1]
    num_experts, double, _ = tensors.gate_up.shape
    inner, num_pairs = double // 2, tokens * chosen
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    tile = choose_tile(
        num_pairs, num_experts, is_mx=isinstance(tensors.gate_up, MxTensor), element_bytes=x.element_size()
    )
    sort = block_rows_triton if num_pairs <= MAX_PAIRS else block_rows
    pairs, block_expert = sort(experts.reshape(-1).long(), num_experts, tile.block_m)
    inner_P = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    results_P = torch.empty((num_pairs, width), dtype=torch.float32, device=x.device)
    weights_P = weights.reshape(-1).float().contiguous()
    sizes = {
        "UPCAST": INTERPRETED,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_J": tile.block_j,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    blocks, scales, is_mx = _operands(tensors.gate_up)
    into_experts[(-(-inner // tile.block_n), len(pairs))](
        x, blocks, scales, x if tensors.gate_up_bias is None else tensors.gate_up_bias, weights_P, inner_P, pairs,
        block_expert, num_pairs, width, inner, x.stride(0), rule.limit or 0.0, rule.gain, rule.up_offset,
        NUM_CHOSEN=chosen, INTERLEAVED=tensors.interleaved, IS_MX=is_mx, HAS_BIAS=tensors.gate_up_bias is not None,
        SCALES_INPUT=scales_input, HAS_LIMIT=rule.limit is not None, GELU=rule.activation == "gelu_tanh", **sizes,
    )  # fmt: skip
    blocks, scales, is_mx = _operands(tensors.down)
    out_of_experts[(-(-width // tile.block_n), len(pairs))](
        inner_P, blocks, scales, x if tensors.down_bias is None else tensors.down_bias, weights_P, results_P, pairs,
        block_expert, num_pairs, inner, width,
        IS_MX=is_mx, HAS_BIAS=tensors.down_bias is not None, SCALES_OUTPUT=not scales_input, **sizes,
    )  # fmt: skip
    columns = min(SUM_COLUMNS, next_power_of_two(width))
    sum_experts[(tokens, -(-width // columns))](results_P, out, width, NUM_CHOSEN=chosen, BLOCK_N=columns, num_warps=4)
    return out


def _operands(weight: torch.Tensor | MxTensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The weight, its MXFP4 scales (or the weight again), and whether it is MXFP4: the arguments of a kernel."""
    if isinstance(weight, MxTensor):
        return weight.blocks, weight.scales, True
    return weight, weight, False


def choose_tile(num_pairs: int, num_experts: int, *, is_mx: bool, element_bytes: int) -> Tile:
    """The tile for this many pairs of token and expert."""
    if element_bytes > 2:
        return FLOAT32_TILE
    rows = num_pairs / num_experts
    return (MXFP4_TILES if is_mx else TILES)[0 if rows <= 16 else 1 if rows <= 96 else 2]
