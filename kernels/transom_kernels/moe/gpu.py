"""Launches the Triton kernels of an MoE layer: sort pairs into row blocks, two grouped matmuls, sum over each token's experts. And
the one of a linear layer over a quantised weight, which has one expert.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token, P = T K pairs of token and expert.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from transom_kernels.launch import INTERPRETED, next_power_of_two
from transom_kernels.moe.gpu_weights import spreads_elements
from transom_kernels.moe.kernel import into_experts, out_of_experts, sum_experts
from transom_kernels.moe.row_blocks import MAX_PAIRS, block_rows, block_rows_triton
from transom_kernels.moe.weights import MX_GROUP, ExpertTensors, GateRule, GpuMatrix, Matrix
from transom_kernels.prepared_launch import PreparedLaunch, kept

_Kind = tuple[tuple[str, Any], ...]  # a matrix's constants; hashable
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
INT4_SMALL = replace(MX_SMALL, num_stages=4)  # elsewhere: five stages with scales of 32 weights do not fit into sm_89
ZEROS_SMALL = replace(MX_SMALL, block_n=128)  # Hopper: more weights an iteration make up for zero points
# 8 bits a weight: on Hopper, and elsewhere
BYTE_HOPPER = (replace(MX_SMALL, num_stages=4), replace(MX_MIDDLE, num_stages=2), replace(MX_LARGE, num_stages=2))
BYTE_TILES = (replace(MX_SMALL, block_j=128, num_stages=4), MX_MIDDLE, MX_MIDDLE)
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
    `tensors` has the matrices (quantised ones as `GpuMatrix`) and biases, `rule` the activation between them. With `scales_input`
    the routing weight multiplies an expert's input (Llama 4), otherwise its output. `op.moe` has checked shapes and dtypes.
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
        (launches.into_columns, num_blocks, 1), (x, *layer.gate_up, weights_P, inner_P, pairs, block_expert), num_pairs
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
        self.num_experts, width, self.inner = tensors.down.shape
        self.gate_up = _operands(tensors.gate_up, tensors.gate_up_bias)
        self.down = _operands(tensors.down, tensors.down_bias)
        kinds = _kind(tensors.gate_up), _kind(tensors.down)
        has_bias = tensors.gate_up_bias is not None, tensors.down_bias is not None
        self._element_bytes, is_hopper = x.element_size(), spreads_elements(x.device)
        kind = kinds[0] if isinstance(tensors.gate_up, GpuMatrix) else kinds[1]
        self._kind: dict[str, Any] = {"kind": kind, "is_hopper": is_hopper}
        shapes = (width, self.inner, chosen, x.stride(0), rule, kinds, has_bias)
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
    kinds: tuple[_Kind, _Kind],
    has_bias: tuple[bool, bool],
    interleaved: bool,
    scales_input: bool,
    is_spread: bool,
) -> _Launches:
    sizes, (gate_limit, up_limit) = _sizes(tile, is_spread), rule.limits or (0.0, 0.0)
    into = {
        **dict(kinds[0]),
        "width": width,
        "inner": inner,
        "x_stride": x_stride,
        "gate_limit": gate_limit,
        "up_limit": up_limit,
        "gain": rule.gain,
        "up_offset": rule.up_offset,
        "NUM_CHOSEN": chosen,
        "INTERLEAVED": interleaved,
        "HAS_BIAS": has_bias[0],
        "SCALES_INPUT": scales_input,
        "HAS_LIMITS": rule.limits is not None,
        "ACTIVATION": rule.activation,
    }
    out_of = {
        **dict(kinds[1]),
        "width": inner,
        "columns": width,
        "x_stride": inner,
        "IS_DENSE": False,
        "HAS_BIAS": has_bias[1],
        "SCALES_OUTPUT": not scales_input,
    }
    columns = min(SUM_COLUMNS, next_power_of_two(width))
    return _Launches(
        PreparedLaunch(into_experts, into | sizes, **_options(tile)),
        -(-(2 if rule.has_gates else 1) * inner // tile.block_n),
        PreparedLaunch(out_of_experts, out_of | sizes, **_options(tile)),
        -(-width // tile.block_n),
        PreparedLaunch(sum_experts, {"columns": width, "NUM_CHOSEN": chosen, "BLOCK_N": columns}, num_warps=4),
        -(-width // columns),
    )


def dense_triton(x: torch.Tensor, weight: GpuMatrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return `x @ weight.T + bias` [M, rows] in `dtype`, of `x` [M, columns] whose rows may lie any stride apart; the weight has
    one matrix, and `bias` is [rows]."""
    num_rows, outputs = len(x), weight.shape[1]
    out = x.new_empty(num_rows, outputs, dtype=dtype)
    if num_rows:
        kind, is_hopper = _kind(weight), spreads_elements(x.device)
        tile = choose_tile(num_rows, 1, x.element_size(), kind=kind, is_hopper=is_hopper)
        launch, columns = _dense(tile, weight.shape[2], outputs, x.stride(0), kind, bias is not None, is_hopper)
        operands = (x, *_operands(weight, bias), x, out, x, x)
        launch((columns, -(-num_rows // tile.block_m), 1), operands, num_rows)
    return out


@cache
def _dense(
    tile: Tile, width: int, outputs: int, x_stride: int, kind: _Kind, has_bias: bool, is_spread: bool
) -> tuple[PreparedLaunch, int]:
    """Return the prepared launch of all linear layers of one shape, and its programs along the columns."""
    numbers = {"width": width, "columns": outputs, "x_stride": x_stride}
    flags = {"IS_DENSE": True, "HAS_BIAS": has_bias, "SCALES_OUTPUT": False}
    constants = dict(kind) | numbers | flags | _sizes(tile, is_spread)
    return PreparedLaunch(out_of_experts, constants, **_options(tile)), -(-outputs // tile.block_n)


def _kind(weight: Matrix) -> tuple[tuple[str, Any], ...]:
    """Return the constants that describe a matrix to a kernel."""
    if not isinstance(weight, GpuMatrix):
        found = ("", "", False, False, MX_GROUP)
    else:
        has = weight.zeros is not None, weight.row_scales is not None
        found = (weight.numbers, weight.scale_kind, *has, weight.group)
    return tuple(zip(("NUMBERS", "SCALES", "HAS_ZEROS", "HAS_ROW_SCALES", "GROUP"), found, strict=True))


def _operands(weight: Matrix, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return a kernel's arguments: the weight, scales, zero points, scales of rows, and bias; the weight stands in for what is
    absent."""
    if isinstance(weight, GpuMatrix):
        first, *parts = weight.words, weight.scales, weight.zeros, weight.row_scales, bias
    else:
        assert isinstance(weight, torch.Tensor)
        first, *parts = weight, None, None, None, bias
    return (first, *(first if part is None else part for part in parts))


def _sizes(tile: Tile, is_spread: bool) -> dict[str, Any]:
    sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_J": tile.block_j}
    return sizes | {"UPCAST": INTERPRETED, "IS_SPREAD": is_spread}


def _options(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def choose_tile(num_pairs: int, num_experts: int, element_bytes: int, *, kind: _Kind, is_hopper: bool) -> Tile:
    """Return the tile for an expert's average number of rows, `num_pairs / num_experts`."""
    constants = dict(kind)
    numbers = constants["NUMBERS"]
    if element_bytes > 2:
        return replace(FLOAT32_TILE, block_j=128) if numbers else FLOAT32_TILE
    tiles = (SMALL, MIDDLE, LARGE)
    if numbers in ("fp8", "int8"):
        tiles = BYTE_HOPPER if is_hopper else BYTE_TILES
    elif numbers:
        tiles = (MX_SMALL, MX_MIDDLE, MX_LARGE if is_hopper else MX_MIDDLE)
        if numbers == "int4" and not is_hopper:
            tiles = (INT4_SMALL, *tiles[1:])
        elif constants["HAS_ZEROS"]:
            tiles = (ZEROS_SMALL, *tiles[1:])
    rows = num_pairs / num_experts
    return tiles[0 if rows <= 16 else 1 if rows <= 96 else 2]
