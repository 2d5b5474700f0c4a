"""Launches of the experts' CPU kernels.

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token, P = T K pairs of token and expert.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.target import cpu_target
from transom_kernels.moe.packed import PackedExperts, PackedMatrix
from transom_kernels.moe.weights import GateRule

MODULE = "transom_kernels.moe.cpu_kernel"
EXPERTS_PER_ITEM = 16  # of `gather_rows`
SPARE_ROWS = 15  # after all rows, as AMX reads and writes whole tiles
MAX_PAIRS = 4096  # of a launch: sums of all pairs stay in a thread's cache


def moe_cpu(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    rule: GateRule,
    *,
    scales_input: bool,
) -> torch.Tensor:
    """`sum_k weights[t, k] * expert(experts[t, k])(x[t])`, [T, N] in the dtype of `x`; see `op.moe`."""
    tokens, num_chosen = experts.shape
    out = empty((tokens, packed.width), x.dtype)
    experts, weights = experts.to(torch.int64).contiguous(), weights.contiguous()
    at_once = max(1, MAX_PAIRS // max(1, num_chosen))
    for begin in range(0, tokens, at_once):
        part = slice(begin, begin + at_once)
        _some_tokens(x[part], experts[part], weights[part], packed, rule, out[part], scales_input=scales_input)
    return out


def _some_tokens(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    rule: GateRule,
    out: torch.Tensor,
    *,
    scales_input: bool,
) -> None:
    (tokens, num_chosen), num_experts, dtype = experts.shape, packed.num_experts, DTYPES[x.dtype]
    pairs, columns, inner = tokens * num_chosen, packed.gate_up.columns, packed.down.columns
    rows, activations = empty((pairs + SPARE_ROWS, columns), x.dtype), empty((pairs + SPARE_ROWS, inner), x.dtype)
    places, expert_at = empty((pairs,), torch.int64), empty((pairs,), torch.int64)
    first_of, count_of = empty((num_experts,), torch.int64), empty((num_experts,), torch.int64)
    launch(
        cpu_kernel(MODULE, "make_gather_rows", dtype=dtype),
        pairs + -(-num_experts // EXPERTS_PER_ITEM),
        [
            x, experts, weights if scales_input else None, rows, places, expert_at, first_of, count_of, pairs, num_chosen,
            packed.width, columns, num_experts, x.stride(0) * x.itemsize,
        ],
    )  # fmt: skip
    slots = min(pairs, num_experts)
    slots_are_places = int(pairs <= num_experts)
    matrix, scratch_bytes = packed.gate_up, 64 + (pairs + SPARE_ROWS) * 256
    launch(
        cpu_kernel(MODULE, "make_gate_up", kind=_kind(matrix), dtype=dtype, activation=rule.activation),
        slots * matrix.num_panels,
        [
            rows, matrix.panels, packed.gate_up_bias, activations, expert_at, first_of, count_of, slots_are_places,
            matrix.num_panels, matrix.panel_bytes, _units(matrix), columns * x.itemsize, float(rule.gain),
            int(rule.limit is not None), float(rule.limit or 0.0), float(rule.up_offset),
        ],
        scratch_bytes=scratch_bytes,
    )  # fmt: skip
    matrix = packed.down
    launch(
        cpu_kernel(MODULE, "make_down_and_sum", kind=_kind(matrix), dtype=dtype),
        matrix.num_panels,
        [
            activations, matrix.panels, packed.down_bias, None if scales_input else weights, out, places, expert_at,
            first_of, count_of, slots_are_places, slots, matrix.num_panels, matrix.panel_bytes, _units(matrix),
            inner * x.itemsize, tokens, num_chosen, packed.width,
        ],
        scratch_bytes=scratch_bytes,
    )  # fmt: skip


def _kind(matrix: PackedMatrix) -> str:
    if matrix.dtype is None:
        return "mx"
    return "tiles" if matrix.dtype == torch.bfloat16 and cpu_target().amx else DTYPES[matrix.dtype]


def _units(matrix: PackedMatrix) -> int:
    """Steps along the columns (`cpu_product`)."""
    return matrix.columns if matrix.dtype == torch.float32 else matrix.columns // 2
