"""Launches the Triton kernels of an MoE layer: sort pairs into row blocks, two grouped matmuls, sum over each token's experts.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token, P = T K pairs of token and expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from transom_kernels.launch import INTERPRETED, next_power_of_two
from transom_kernels.moe.gpu_weights import spreads_elements
from transom_kernels.moe.kernel import into_experts, out_of_experts, sum_experts
from transom_kernels.moe.row_blocks import MAX_PAIRS, block_rows, block_rows_triton
from transom_kernels.moe.weights import ExpertTensors, GateRule, MxTensor
from transom_kernels.prepared_launch import PreparedLaunch, kept

SUM_COLUMNS = 1024  # most columns that a program of `sum_experts` computes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The tile of a grouped matmul: pairs, rows of the matrix, and inner elements of an iteration; warps and pipeline stages."""

    block_m: int
    block_n: int
    block_j: int
    num_warps: int
    num_stages: int


# SMALL is for few rows per expert, where reading weights takes most of the time
SMALL = Tile(block_m=16, block_n=64, block_j=128, num_warps=4, num_stages=4)
MIDDLE = Tile(block_m=64, block_n=128, block_j=64, num_warps=4, num_stages=3)
LARGE = Tile(block_m=128, block_n=128, block_j=64, num_warps=8, num_stages=3)
MX_SMALL = replace(SMALL, block_j=256, num_stages=5)  # as many bytes of weights in flight, in fewer iterations
MX_MIDDLE = replace(MIDDLE, block_j=128)
MX_LARGE = replace(LARGE, block_n=256, block_j=128)  # for Hopper: elsewhere it takes more registers than there are
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

    `x` [T, N] are hidden states; `experts` [T, K] and `weights` [T, K] are each token's experts and their routing weights;
    `tensors` has the matrices (MXFP4 as by `for_gpu`) and biases, `rule` the activation between them. With `scales_input` the
    routing weight multiplies an expert's input (Llama 4), otherwise its output. `op.moe` has checked shapes and dtypes.
    """
    (tokens, width), chosen = x.shape, experts.shape[1]
    num_pairs = tokens * chosen
    out = x.new_empty(tokens, width)
    if not tokens:
        return out
    key = (rule, scales_input, chosen, x.stride(0), x.dtype)
    layer = kept(tensors.prepared, key, _Layer, x, tensors, rule, chosen, scales_input)
    tile, launches = layer.launches(num_pairs)
    sort = block_rows_triton if num_pairs <= MAX_PAIRS else block_rows
    pairs, block_expert = sort(experts.reshape(-1).long(), layer.num_experts, tile.block_m)
    num_blocks = block_expert.shape[0]
    inner_P = x.new_empty(num_pairs, layer.inner)
    results_P = x.new_empty(num_pairs, width)
    weights_P = weights.float().contiguous()
    launches.into(
        (launches.into_columns, num_blocks, 1),
        (x, *layer.gate_up, weights_P, inner_P, pairs, block_expert),
        num_pairs,
    )
    launches.out_of(
        (launches.out_columns, num_blocks, 1),
        (inner_P, *layer.down, weights_P, results_P, pairs, block_expert),
        num_pairs,
    )
    launches.sum((tokens, launches.sum_columns, 1), (results_P, out))
    return out


@dataclass(slots=True)
class _Launches:
    """The prepared launches of all layers of one shape, and how many programs each has along its columns."""

    into: PreparedLaunch
    into_columns: int
    out_of: PreparedLaunch
    out_columns: int
    sum: PreparedLaunch
    sum_columns: int


class _Layer:
    """What the calls of a layer share: its operands, and the launches for each tile."""

    def __init__(
        self, x: torch.Tensor, tensors: ExpertTensors, rule: GateRule, chosen: int, scales_input: bool
    ) -> None:
        self.num_experts, double, width = tensors.gate_up.shape
        self.inner = double // 2
        self.gate_up = _operands(tensors.gate_up, tensors.gate_up_bias)
        self.down = _operands(tensors.down, tensors.down_bias)
        is_mx = isinstance(tensors.gate_up, MxTensor), isinstance(tensors.down, MxTensor)
        has_bias = tensors.gate_up_bias is not None, tensors.down_bias is not None
        self._element_bytes, is_hopper = x.element_size(), spreads_elements(x.device)
        self._kind = {"is_mx": any(is_mx), "is_hopper": is_hopper}
        shapes = (width, self.inner, chosen, x.stride(0), rule, is_mx, has_bias)
        self._of_all_tiles = (*shapes, tensors.interleaved, scales_input, is_hopper)
        self._by_tile: dict[Tile, _Launches] = {}

    def launches(self, num_pairs: int) -> tuple[Tile, _Launches]:
        """Return the tile for this many pairs, and the launches with it."""
        tile = choose_tile(num_pairs, self.num_experts, self._element_bytes, **self._kind)
        return tile, kept(self._by_tile, tile, _launches, tile, *self._of_all_tiles)


@cache
def _launches(
    tile: Tile,
    width: int,
    inner: int,
    chosen: int,
    x_stride: int,
    rule: GateRule,
    is_mx: tuple[bool, bool],
    has_bias: tuple[bool, bool],
    interleaved: bool,
    scales_input: bool,
    is_spread: bool,
) -> _Launches:
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_J": tile.block_j}
    sizes |= {"UPCAST": INTERPRETED, "IS_SPREAD": is_spread}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    into = {
        "width": width,
        "inner": inner,
        "x_stride": x_stride,
        "limit": rule.limit or 0.0,
        "gain": rule.gain,
        "up_offset": rule.up_offset,
        "NUM_CHOSEN": chosen,
        "INTERLEAVED": interleaved,
        "IS_MX": is_mx[0],
        "HAS_BIAS": has_bias[0],
        "SCALES_INPUT": scales_input,
        "HAS_LIMIT": rule.limit is not None,
        "GELU": rule.activation == "gelu_tanh",
    }
    out_of = {
        "width": inner,
        "columns": width,
        "IS_MX": is_mx[1],
        "HAS_BIAS": has_bias[1],
        "SCALES_OUTPUT": not scales_input,
    }
    columns = min(SUM_COLUMNS, next_power_of_two(width))
    return _Launches(
        PreparedLaunch(into_experts, into | sizes, **options),
        -(-2 * inner // tile.block_n),
        PreparedLaunch(out_of_experts, out_of | sizes, **options),
        -(-width // tile.block_n),
        PreparedLaunch(sum_experts, {"columns": width, "NUM_CHOSEN": chosen, "BLOCK_N": columns}, num_warps=4),
        -(-width // columns),
    )


def _operands(
    weight: torch.Tensor | MxTensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a kernel's three arguments: the weight, its MXFP4 scales and the bias; the weight stands in for what is absent."""
    plain, scales = (weight.blocks, weight.scales) if isinstance(weight, MxTensor) else (weight, weight)
    return plain, scales, plain if bias is None else bias


def choose_tile(num_pairs: int, num_experts: int, element_bytes: int, *, is_mx: bool, is_hopper: bool) -> Tile:
    """Return the tile for an expert's average number of rows, `num_pairs / num_experts`."""
    if element_bytes > 2:
        return replace(FLOAT32_TILE, block_j=128) if is_mx else FLOAT32_TILE
    tiles = (MX_SMALL, MX_MIDDLE, MX_LARGE if is_hopper else MX_MIDDLE) if is_mx else (SMALL, MIDDLE, LARGE)
    rows = num_pairs / num_experts
    return tiles[0 if rows <= 16 else 1 if rows <= 96 else 2]
