"""`gated_rms_norm` on CPUs: its kernel, which shares out groups of numbers, and its launch.

    out = rms_norm(x) * weight * silu(gate)            with `gates_first`: out = rms_norm(x * silu(gate)) * weight

Legend: T tokens, N row width.
"""

from typing import Any, NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.simd import (
    float_argument,
    fma,
    lane_sum,
    load_f32,
    row_access,
    sigmoid,
    splat,
    sqrt,
    store_f32,
)
from transom_kernels.cpu.work import argument, each_item, helper, row_address, scratch
from transom_kernels.linear_recurrence.inputs import GatedNorm

ITEM_ELEMENTS = 2048  # about as many elements as one work item computes


class GatedNormArguments(NamedTuple):
    """The argument words of the kernel `gated_norm`."""

    x: RowArguments  # [T, N]
    gate: RowArguments  # [T, N], or [T, groups of a row]
    weight: torch.Tensor | None  # [N] or [size]
    weight_groups: int  # how many groups have a weight of their own
    out: torch.Tensor  # [T, N], contiguous
    num_groups: int  # of all rows
    groups_of_row: int
    groups_of_item: int
    size: int  # numbers of a group
    eps: float


AT = numbers_of(GatedNormArguments)


def gated_rms_norm_cpu(norm: GatedNorm) -> torch.Tensor:
    """Return rms_norm(x) * weight * silu(gate), or with `gates_first` rms_norm(x * silu(gate)) * weight, of groups; [T, N]."""
    x, gate, weight, eps, size, gates_first, by_sigmoid = norm
    rows, width = x.shape
    out, groups, per_item = empty(x.shape, x.dtype), width // size, max(1, ITEM_ELEMENTS // size)
    kinds = {"dtype": DTYPES[x.dtype], "weight_dtype": DTYPES[x.dtype if weight is None else weight.dtype]}
    launch(
        cpu_kernel(
            "transom_kernels.linear_recurrence.cpu.gated_norm",
            "make_gated_norm",
            **kinds,
            gates_first=gates_first,
            by_sigmoid=by_sigmoid,
            shares_gates=norm.shares_gates,
        ),
        -(-rows * groups // per_item),
        GatedNormArguments(
            x=RowArguments.of(x),
            gate=RowArguments.of(gate),
            weight=weight,
            weight_groups=1 if weight is None else weight.numel() // size,
            out=out,
            num_groups=rows * groups,
            groups_of_row=groups,
            groups_of_item=per_item,
            size=size,
            eps=eps,
        ),
        scratch_bytes=4 * (size + 16),
    )
    return out


def make_gated_norm(dtype: str, weight_dtype: str, gates_first: bool, by_sigmoid: bool, shares_gates: bool) -> Any:
    """Build the kernel. A work item is `groups_of_item` groups. With `shares_gates` all numbers of a group have one gate."""
    (load, store, size), (load_weight, _, weight_size) = row_access(dtype), row_access(weight_dtype)

    @helper
    def norm_group(x, gate, weight, out, width, eps, product):
        """Compute one group; `product` is memory for `width` float32."""
        total = splat(0.0)
        for k in range(0, width, 16):
            lanes = load(x + k * size, width - k)
            if gates_first or weight == 0:
                gates = splat(lane_sum(load(gate, 1))) if shares_gates else load(gate + k * size, width - k)
                lanes = lanes * (sigmoid(gates) if by_sigmoid else gates * sigmoid(gates))
            total = fma(lanes, lanes, total)
            store_f32(product + 4 * k, lanes)
        scale = splat(1.0 / sqrt(lane_sum(total) / width + eps)) if weight else splat(1.0)
        for k in range(0, width, 16):
            lanes = load_f32(product + 4 * k) * scale
            if weight:
                lanes = lanes * load_weight(weight + k * weight_size, width - k)
                if not gates_first:
                    gates = load(gate + k * size, width - k)
                    lanes = lanes * (sigmoid(gates) if by_sigmoid else gates * sigmoid(gates))
            store(out + k * size, lanes, width - k)

    @each_item
    def gated_norm(arguments, thread, item):
        width, weight = argument(arguments, AT.size), argument(arguments, AT.weight)
        groups, per_item = argument(arguments, AT.groups_of_row), argument(arguments, AT.groups_of_item)
        eps = float_argument(arguments, AT.eps)
        for group in range(item * per_item, min((item + 1) * per_item, argument(arguments, AT.num_groups))):
            row, at = group // groups, group % groups * width * size
            own = weight
            if weight:
                own = weight + group % argument(arguments, AT.weight_groups) * width * weight_size
            out = argument(arguments, AT.out) + group * width * size
            x, gate = row_address(arguments, AT.x, row), row_address(arguments, AT.gate, row)
            gate += group % groups * size if shares_gates else at
            norm_group(x + at, gate, own, out, width, eps, scratch(thread))

    return gated_norm
