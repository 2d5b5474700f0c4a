"""Weights of linear layers in 8 or 4 bits: how they are rounded, and the memory layout that CPU kernels read.

- group: 32 neighbouring columns of a row; they share a scale, and in some formats a minimum.
- level: the unsigned integer that stands for an element: element = scale * (level - zero), or scale * level + minimum.
- panel: 16 rows whose levels are stored together, so that one load brings four columns of each of the 16 rows.
- quad: four neighbouring columns of a row.

    format      levels      zero   format of GGUF that equals it
    int8        1 to 255    128    Q8_0 (there signed, -127 to 127)
    int8_min    0 to 255    -      -
    int4        0 to 15     8      Q4_0
    int4_min    0 to 15     -      Q4_1, which has a minimum

Legend: N rows (output width), K columns (input width), P panels of 16 rows, G groups of 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
import torch.nn.functional as F

from transom_kernels.cpu.memory import weight_memory

GROUP = 32  # columns that share a scale, also in GGUF files and in MXFP4
PANEL = 16  # rows (outputs) of a weight that are stored together
QUADS = GROUP // 4  # quads (four columns of one row) of a group
LINE = 64  # bytes of a line: one quad of levels of each of a panel's rows
ZERO = {
    "int8": 128,
    "int8_min": 0,
    "int4": 8,
    "int4_min": 0,
}  # format -> the level that stands for 0 (before a minimum is added)
RECORD = 80  # bytes of a group of a rounded row (`row_products.py`)
MOST_ROWS = 8  # most rows of a block
# a group of x whose largest magnitude is below this becomes zeros: the inverse of tiny magnitudes overflows
SMALLEST = 1e-30


def is_small(format: str) -> bool:
    """Return whether the format's levels have 4 bits."""
    return format.startswith("int4")


def has_minimum(format: str) -> bool:
    """Return whether the format's groups have a minimum in addition to their scale."""
    return format.endswith("_min")


def group_bytes(format: str) -> tuple[int, int]:
    """Return the bytes of a panel's group: those of its levels, and those of its scales and minima."""
    return QUADS * LINE // (2 if is_small(format) else 1), LINE if has_minimum(format) else LINE // 2


# fp4 (e2m1) numbers by their bits
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MIDDLE = {"fp4": 0, "fp8": 0, "int4": 8, "int8": 128}  # the number that stands for 0 without zero points
Numbers = Literal["fp4", "fp8", "int4", "int8"]  # of weights for GPUs
Format = Literal["int8", "int8_min", "int4", "int4_min"]

_CHUNK_ROWS = 4096  # rows that are rounded or packed at once: few enough that their float32 copies stay small


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A quantised weight in rows, the order of files. `BY_ROW` names its tensors, whose first axis is N."""

    BY_ROW: ClassVar[tuple[str, ...]] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that there are, by name."""
        found = {name: getattr(self, name) for name in self.BY_ROW}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def map_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the weight whose rows `change` has chosen or reordered, in each tensor alike."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedRows(Rows):
    """A weight for CPUs. Columns past K in the last group have the level that stands for 0."""

    BY_ROW = ("levels", "scales", "minima")
    format: Format
    levels: torch.Tensor  # [N, 32 G] uint8
    scales: torch.Tensor  # [N, G] float16
    minima: torch.Tensor | None  # [N, G] float16, of int8_min and int4_min
    width: int

    def dequantised(self) -> torch.Tensor:
        """Return the elements, [N, K] float32."""
        levels = self.levels.view(len(self.levels), -1, GROUP).float() - ZERO[self.format]
        elements = levels * self.scales[..., None].float()
        if self.minima is not None:
            elements += self.minima[..., None].float()
        return elements.flatten(1)[:, : self.width]

    def scaled(self, factor: float) -> QuantisedRows:
        """Return the weight times `factor`; scales and minima are rounded again."""
        minima = None if self.minima is None else (self.minima.float() * factor).half()
        return replace(self, scales=(self.scales.float() * factor).half(), minima=minima)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRows(Rows):
    """A weight for GPUs, before it is arranged (`moe.gpu_weights`): element = (number - zero point) * scale * scale of the row.

    Zero points are those of integers; if absent, the middle integer. With an `order`, column k multiplies column `order[k]` of x.
    """

    BY_ROW = ("levels", "scales", "zeros", "row_scales", "input_scales")
    numbers: Numbers
    levels: torch.Tensor  # [N, K] uint8: the bits of one number each
    group: int  # columns with one scale and zero point
    scales: torch.Tensor | None = None  # [N, G] bfloat16, e4m3, or e8m0: powers of two
    zeros: torch.Tensor | None = None  # [N, G] uint8
    row_scales: torch.Tensor | None = None  # [N] float32
    # [N] float32, of fp8 whose inputs are to be rounded to fp8: by this scale, or if it is 0 by one of each row of x
    input_scales: torch.Tensor | None = None
    order: torch.Tensor | None = None  # [K] int64

    @property
    def width(self) -> int:
        """Columns (K)."""
        return self.levels.shape[1]

    @property
    def format(self) -> str:
        """What weights must have in common to be one: numbers, groups, kinds of tensors, order."""
        kinds = {name: tensor.dtype for name, tensor in self.tensors().items()}
        order = self.order is not None and (self.order.is_meta or hash(tuple(self.order.tolist())))
        return f"{self.numbers} {self.group} {kinds} {order}"

    def to(self, device: torch.device) -> GpuRows:
        """Return the weight on a device."""
        moved = self.map_rows(lambda tensor: tensor.to(device))
        return moved if self.order is None else replace(moved, order=self.order.to(device))

    def scaled(self, factor: float) -> GpuRows:
        """Return the weight times `factor`: its rows have scales."""
        ones = torch.ones(len(self.levels), device=self.levels.device)
        return replace(self, row_scales=factor * (ones if self.row_scales is None else self.row_scales))

    def without_empty_groups(self) -> GpuRows | None:
        """Return the weight without scales of 0, which kernels do not take: the numbers of these groups become 0. None if a scale
        is negative, or above 2 ** 26."""
        if self.scales is None or self.scales.is_meta:
            return self
        scales = self.scales.float()
        if not bool(((scales >= 0) & (scales <= 2.0**26)).all()):
            return None
        empty = scales == 0
        if not bool(empty.any()):
            return self
        points = torch.full_like(scales, MIDDLE[self.numbers]) if self.zeros is None else self.zeros
        levels = torch.where(self._each(empty) > 0, self._each(points).to(torch.uint8), self.levels)
        return replace(self, levels=levels, scales=scales.masked_fill(empty, 2.0**-9).to(self.scales.dtype))

    def dequantised(self) -> torch.Tensor:
        """Return the elements in float32, [N, K], columns in the order of x."""
        if self.numbers == "fp4":
            elements = torch.tensor(FP4, device=self.levels.device)[self.levels.int()]
        elif self.numbers == "fp8":
            elements = self.levels.view(torch.float8_e4m3fn).float()
        else:
            elements = self.levels.float()
        elements = elements - (MIDDLE[self.numbers] if self.zeros is None else self._each(self.zeros))
        if self.scales is not None:
            elements = elements * self._each(self.scales)
        if self.row_scales is not None:
            elements = elements * self.row_scales[:, None]
        return elements if self.order is None else elements[:, self.order.argsort()]

    def _each(self, of_group: torch.Tensor) -> torch.Tensor:
        """Return the values of groups for every column, in float32."""
        return of_group.float().repeat_interleave(self.group, dim=1)[:, : self.width]


StoredRows = QuantisedRows | GpuRows
AnyRows = TypeVar("AnyRows", bound=StoredRows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPanels:
    """A weight in the layout that kernels read.

    A group of a panel has 8 lines of 64 bytes, one for each quad: byte 4 i + j of line q is the level of column 4 q + j of the
    panel's row i. In 4 bits it has 4 lines: the low half-bytes of line q are quad 2 q, and the high ones quad 2 q + 1. The group
    has 16 scales, one for each row, followed by 16 minima if the format has them.

    A gated weight has two matrices of N rows each: panels 0, 2, 4, ... belong to gate, and panels 1, 3, 5, ... to up.
    """

    format: Format
    levels: torch.Tensor  # [P, G, 8, 64] uint8; [P, G, 4, 64] in 4 bits
    scales: torch.Tensor  # [P, G, 1 or 2, 16] float16
    bias: torch.Tensor | None  # [P, 16] float32
    num_outputs: int  # of each matrix
    width: int
    is_gated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of levels, scales and minima, padding included."""
        return self.levels.nbytes + self.scales.nbytes

    def biases(self) -> tuple[torch.Tensor | None, ...]:
        """Return the bias [N] of each matrix: one, or those of gate and up."""
        count = 2 if self.is_gated else 1
        if self.bias is None:
            return (None,) * count
        return tuple(self.bias[part::count].flatten()[: self.num_outputs] for part in range(count))

    def unpacked(self) -> tuple[QuantisedRows, ...]:
        """Return the matrices in rows: one, or gate and up."""
        levels = self.levels
        if is_small(self.format):
            levels = torch.stack((levels & 15, levels >> 4), dim=3).flatten(2, 3)
        num_panels, num_groups = levels.shape[:2]
        levels = levels.view(num_panels, num_groups, QUADS, PANEL, 4).permute(0, 3, 1, 2, 4)
        levels = levels.reshape(num_panels, PANEL, num_groups * GROUP)
        factors = self.scales.permute(2, 0, 3, 1)  # [1 or 2, P, 16, G]
        count = 2 if self.is_gated else 1
        return tuple(
            QuantisedRows(
                format=self.format,
                levels=levels[part::count].flatten(0, 1)[: self.num_outputs],
                scales=factors[0, part::count].flatten(0, 1)[: self.num_outputs],
                minima=factors[1, part::count].flatten(0, 1)[: self.num_outputs] if len(factors) > 1 else None,
                width=self.width,
            )
            for part in range(count)
        )


def quantise(weight_NK: torch.Tensor, format: Format) -> QuantisedRows:
    """Round a weight [N, K] to the nearest levels. Levels are chosen for the rounded scales, and so make up for their rounding."""
    chunks = [_quantise_rows(rows, format) for rows in torch.split(weight_NK, _CHUNK_ROWS)]
    levels, scales, minima = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return QuantisedRows(
        format=format,
        levels=levels,
        scales=scales,
        minima=minima if has_minimum(format) else None,
        width=weight_NK.shape[1],
    )


def _quantise_rows(weight_NK: torch.Tensor, format: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels [N, 32 G], scales [N, G] and minima [N, G] of N rows."""
    width = weight_NK.shape[1]
    padding = -width % GROUP
    # missing columns of the last group repeat column K - 1, so that the group's smallest and largest elements do not change
    columns = torch.arange(width + padding).clamp_(max=width - 1)
    elements = (weight_NK[:, columns] if padding else weight_NK).float()
    groups = elements.reshape(len(elements), -1, GROUP)
    if has_minimum(format):
        largest = 15 if is_small(format) else 255
        low, high = groups.aminmax(dim=-1)
        minima, scales = low.half(), ((high - low) / largest).half()
        levels = _divided(groups - minima[..., None].float(), scales).clamp_(0, largest)
    else:
        minima = torch.zeros(groups.shape[:2], dtype=torch.float16)
        magnitude = groups.abs().amax(dim=-1)
        if format == "int8":
            scales, least, most = (magnitude / 127).half(), -127, 127
        else:  # the element of the largest magnitude, positive or negative, becomes -8, for which there is a level (not for +8)
            extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))[..., 0]
            scales, least, most = (extreme / -8).half(), -8, 7
        levels = _divided(groups, scales).clamp_(least, most).add_(ZERO[format])
    levels = levels.to(torch.uint8).flatten(1)
    levels[:, width:] = ZERO[format]
    return levels, scales, minima


def _divided(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return elements divided by their group's scale and rounded; 0 where the scale is 0."""
    scale = scales[..., None].float()
    return torch.where(scale == 0, 0.0, elements / scale).round_()


def concatenated(parts: Sequence[AnyRows]) -> AnyRows:
    """Return the rows of several weights of one format and width, one weight after the other.

    Raises:
        ValueError: formats or widths differ.
    """
    first, *others = parts
    if any(other.format != first.format or other.width != first.width for other in others):
        kinds = [f"{part.format} of {part.width} columns" for part in parts]
        raise ValueError(f"weights cannot be concatenated: {', '.join(kinds)}.")
    joined: dict[str, Any] = {name: torch.cat([part.tensors()[name] for part in parts]) for name in first.tensors()}
    return replace(first, **joined)


def pack(rows: QuantisedRows, bias: torch.Tensor | None = None) -> PackedPanels:
    """Pack a weight and its bias [N] into panels. Rows after row N - 1 in the last panel have scale 0."""
    return _placed(_pack(rows, bias))


def _placed(weight: PackedPanels) -> PackedPanels:
    """Return the weight in huge pages; a weight without data, which a plan counts, as it is."""
    if weight.levels.is_meta:
        return weight
    levels, scales = (
        weight_memory(part.nbytes).view(part.dtype).view(part.shape).copy_(part)
        for part in (weight.levels, weight.scales)
    )
    return replace(weight, levels=levels, scales=scales)


def _pack(rows: QuantisedRows, bias: torch.Tensor | None) -> PackedPanels:
    padding = -len(rows.levels) % PANEL
    factors = [part for part in (rows.scales, rows.minima) if part is not None]
    scales = torch.stack([F.pad(part, (0, 0, 0, padding)) for part in factors])  # [1 or 2, 16 P, G]
    num_groups = scales.shape[-1]
    return PackedPanels(
        format=rows.format,
        levels=torch.cat([_pack_levels(part, rows.format) for part in torch.split(rows.levels, _CHUNK_ROWS)]),
        scales=scales.view(len(factors), -1, PANEL, num_groups).permute(1, 3, 0, 2).contiguous(),
        bias=None if bias is None else F.pad(bias.float(), (0, padding)).view(-1, PANEL),
        num_outputs=len(rows.levels),
        width=rows.width,
    )


def pack_gated(
    gate: QuantisedRows, up: QuantisedRows, biases: tuple[torch.Tensor, torch.Tensor] | None = None
) -> PackedPanels:
    """Pack a gate and an up weight of one shape and format into alternating panels.

    Raises:
        ValueError: formats or shapes differ.
    """
    if gate.format != up.format or gate.levels.shape != up.levels.shape:
        shapes = [f"{part.format} {list(part.levels.shape)}" for part in (gate, up)]
        raise ValueError(f"gate and up must be alike, not {' and '.join(shapes)}.")
    panels = [_pack(part, bias) for part, bias in zip((gate, up), biases or (None, None), strict=True)]
    gated = PackedPanels(
        format=gate.format,
        levels=torch.stack([part.levels for part in panels], dim=1).flatten(0, 1),
        scales=torch.stack([part.scales for part in panels], dim=1).flatten(0, 1),
        bias=None
        if biases is None
        else torch.stack([part.bias for part in panels if part.bias is not None], dim=1).flatten(0, 1),
        num_outputs=panels[0].num_outputs,
        width=panels[0].width,
        is_gated=True,
    )
    return _placed(gated)


def _pack_levels(levels: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the levels [N, 32 G] of some panels as [P, G, 8 or 4, 64]."""
    levels = F.pad(levels, (0, 0, 0, -len(levels) % PANEL), value=ZERO[format])
    num_groups = levels.shape[1] // GROUP
    quads = levels.view(-1, PANEL, num_groups, QUADS, 4).permute(0, 2, 3, 1, 4)
    quads = quads.reshape(-1, num_groups, QUADS, 4 * PANEL)
    return quads[:, :, 0::2] | (quads[:, :, 1::2] << 4) if is_small(format) else quads
