"""Launches the CPU kernels of an MoE layer's experts (`cpu_kernel.py`), and declares their arguments.

- pair: a token and one expert that it chose. place: the number of a pair's row among all rows, sorted by expert.
- slot: a candidate for an expert that has rows: each expert, or each place if there are at most E pairs.
- panel: 64 rows of an expert's matrix, as they are stored together (`weights.py`).

Legend: T tokens, N hidden width, I inner width, E experts, K experts per token, P = T K pairs of token and expert.
"""

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.target import cpu_target
from transom_kernels.moe.weights import GateRule, PackedExperts, PackedMatrix

MODULE = "transom_kernels.moe.cpu_kernel"
EXPERTS_PER_ITEM = 16  # experts that one item of `gather_rows` counts
SPARE_ROWS = 15  # rows of memory after the last row, since AMX reads and writes whole tiles of 16
MAX_PAIRS = 4096  # of a launch: each thread keeps 256 bytes of sums for every pair, 1 MiB in its second-level cache


class PlaceArguments(NamedTuple):
    """Where the rows of each expert are. `gather_rows` writes these tensors, the other two kernels read them. All are int64."""

    places: torch.Tensor  # [P]: the place of each pair
    expert_at: torch.Tensor  # [P]: the expert of a place that is its expert's first, else -1
    first_of: torch.Tensor  # [E]: an expert's first place
    count_of: torch.Tensor  # [E]: an expert's pairs


class GatherArguments(NamedTuple):
    """The argument words of `gather_rows`."""

    x: RowArguments  # [T, N]
    experts: torch.Tensor  # [P] int64
    weights: torch.Tensor | None  # [P] float32: if given, each row is multiplied by its weight and rounded
    rows: torch.Tensor  # [P, columns]: the rows of x by place, padded with zeros
    num_pairs: int  # P
    num_chosen: int  # K
    width: int  # N
    columns: int
    num_experts: int  # E
    pairs: PlaceArguments


class MatrixArguments(NamedTuple):
    """The argument words of the product of each row and the matrix of the row's expert."""

    rows: torch.Tensor  # [P, columns] by place
    row_bytes: int
    panels: torch.Tensor
    num_panels: int
    panel_bytes: int
    units: int  # steps along the columns (`cpu_product.py`)
    bias: torch.Tensor | None  # [E, panels, 64] float32
    slots_are_places: bool
    pairs: PlaceArguments


class GateUpArguments(NamedTuple):
    """The argument words of `gate_up`."""

    matrix: MatrixArguments
    activations: torch.Tensor  # [P, columns]
    columns: int  # I, padded
    gain: float  # this and the next four are the fields of `GateRule`
    has_limits: bool
    gate_limit: float
    up_limit: float
    up_offset: float


class DownArguments(NamedTuple):
    """The argument words of `down_and_sum`."""

    matrix: MatrixArguments
    num_slots: int
    weights: torch.Tensor | None  # [P] float32; None: all are 1
    out: torch.Tensor  # [T, N]
    num_tokens: int  # T
    num_chosen: int  # K
    width: int  # N


GATHER, UP, DOWN = numbers_of(GatherArguments), numbers_of(GateUpArguments), numbers_of(DownArguments)


def moe_cpu(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    rule: GateRule,
    *,
    scales_input: bool,
) -> torch.Tensor:
    """Return `sum_k weights[t, k] * expert(experts[t, k])(x[t])`, [T, N] in the dtype of `x`.

    With `scales_input` a weight multiplies its expert's input instead. An expert is `down @ gated(gate_up @ x + bias) + bias`.
    """
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
    gate_limit, up_limit = rule.limits or (0.0, 0.0)
    rows, activations = empty((pairs + SPARE_ROWS, columns), x.dtype), empty((pairs + SPARE_ROWS, inner), x.dtype)
    places = PlaceArguments(
        places=empty((pairs,), torch.int64),
        expert_at=empty((pairs,), torch.int64),
        first_of=empty((num_experts,), torch.int64),
        count_of=empty((num_experts,), torch.int64),
    )
    launch(
        cpu_kernel(MODULE, "make_gather_rows", dtype=dtype),
        pairs + -(-num_experts // EXPERTS_PER_ITEM),
        GatherArguments(
            x=RowArguments.of(x),
            experts=experts,
            weights=weights if scales_input else None,
            rows=rows,
            num_pairs=pairs,
            num_chosen=num_chosen,
            width=packed.width,
            columns=columns,
            num_experts=num_experts,
            pairs=places,
        ),
    )

    def product(rows: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> MatrixArguments:
        return MatrixArguments(
            rows=rows,
            row_bytes=rows.shape[1] * rows.itemsize,
            panels=matrix.panels,
            num_panels=matrix.num_panels,
            panel_bytes=matrix.panel_bytes,
            units=matrix.columns if matrix.dtype == torch.float32 else matrix.columns // 2,
            bias=bias,
            slots_are_places=pairs <= num_experts,
            pairs=places,
        )

    # scratch: the configuration of AMX's tiles, and 64 float32 sums of each row
    slots, scratch_bytes = min(pairs, num_experts), 64 + (pairs + SPARE_ROWS) * 256
    launch(
        cpu_kernel(MODULE, "make_gate_up", kind=_kind(packed.gate_up), dtype=dtype, activation=rule.activation),
        slots * packed.gate_up.num_panels,
        GateUpArguments(
            matrix=product(rows, packed.gate_up, packed.gate_up_bias),
            activations=activations,
            columns=inner,
            gain=float(rule.gain),
            has_limits=rule.limits is not None,
            gate_limit=float(gate_limit),
            up_limit=float(up_limit),
            up_offset=float(rule.up_offset),
        ),
        scratch_bytes=scratch_bytes,
    )
    launch(
        cpu_kernel(MODULE, "make_down_and_sum", kind=_kind(packed.down), dtype=dtype),
        packed.down.num_panels,
        DownArguments(
            matrix=product(activations, packed.down, packed.down_bias),
            num_slots=slots,
            weights=None if scales_input else weights,
            out=out,
            num_tokens=tokens,
            num_chosen=num_chosen,
            width=packed.width,
        ),
        scratch_bytes=scratch_bytes,
    )


def _kind(matrix: PackedMatrix) -> str:
    if matrix.dtype is None:
        return "mx"
    return "tiles" if matrix.dtype == torch.bfloat16 and cpu_target().amx else DTYPES[matrix.dtype]
