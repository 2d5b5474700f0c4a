"""One description of a quantised tensor, whatever wrote its file, and the ways to read a part of it.

    element[n, k] = (number[n, k] - zero) * scale * factor        zero and scale are those of the group that holds (n, k)

- number: an integer of 4 or 8 bits, fp4 (e2m1) or fp8. Small ones lie several in a word (`Packed`).
- group: a block of rows and columns with one scale, and one zero point (the integer that stands for 0). The last groups are smaller
  if their size does not divide the tensor. With *activation order* (GPTQ) a group's columns lie anywhere in the tensor.
- factor: one more number for the whole tensor (NVFP4).

`quantised_checkpoint` makes descriptions of stored tensors. They are views of the files: a read unpacks its part alone.

Legend: N rows, K columns, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from transom_kernels.quantised_linear.weights import FP4, GROUP, Format, GpuRows, Numbers, QuantisedRows
from transom_worker.models.weights.checkpoint import ALL, WHOLE, Mxfp4Tensors, Part

Number = Literal["integer", "fp4", "fp8"]

_EXPONENT_BIAS = 127
_GPU_GROUPS = (128, 64, 32, 16)  # columns of a group; 16 only of fp4
# What kernels hold, by bits and by whether 0 has one level for all groups (`transom_kernels.quantised_linear.weights`).
_FORMATS: dict[tuple[int, bool], Format] = {
    (4, True): "int4",
    (4, False): "int4_min",
    (8, True): "int8",
    (8, False): "int8_min",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Numbers [..., N, K] of 4 or 8 bits, several in each word, from the lowest bits on.

    Number i of a word lies at place `order[i]`; in signed integers `flips` 0x80 makes them unsigned, by adding 128.
    """

    words: torch.Tensor
    bits: int
    axis: Literal[-1, -2] = -1  # of the numbers in a word: neighbouring columns (-1) or rows (-2)
    order: tuple[int, ...] | None = None
    flips: int = 0

    def take(self, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """Return the numbers of these rows and columns in bytes, [..., rows, columns] uint8."""
        each = 8 * self.words.itemsize // self.bits
        total = each * self.words.shape[self.axis]
        if self.axis == -1:
            words, inside = _covering(columns, total, each)
            chosen = self.words[..., rows, words]
        else:
            words, inside = _covering(rows, total, each)
            chosen = self.words[..., words, columns]
        words_bytes = chosen.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        numbers = words_bytes.view(*chosen.shape, self.words.itemsize)
        if self.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
        if self.order is not None:
            numbers = numbers[..., list(self.order)]
        if self.axis == -1:
            return numbers.flatten(-2)[..., inside] ^ self.flips
        return numbers.movedim(-1, -2).flatten(-3, -2)[..., inside, :] ^ self.flips


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensor:
    """A tensor [..., N, K] as stored; leading axes (the experts of a stack) belong to numbers and scales alike."""

    shape: tuple[int, ...]
    kind: Number
    numbers: Packed | torch.Tensor  # a tensor of fp8
    scales: torch.Tensor  # [..., groups of rows, groups of columns]; bytes are powers of two, 2 ** (byte - 127)
    group: tuple[int, int]  # rows and columns of a group
    zeros: Packed | int = 0  # of integers: one for each scale, or the same for all groups
    factor: torch.Tensor | None = None
    group_of_column: torch.Tensor | None = None  # [K], with activation order
    input_scale: torch.Tensor | None = None  # [1], of fp8: see `GpuRows.input_scales`

    def dequantised(self, part: Part = WHOLE) -> torch.Tensor:
        """Return a part's elements in float32."""
        view, rows, columns = self._cut(part)
        scales = view._of_groups(view._numbers_of(view.scales), rows, columns)
        if isinstance(view.numbers, torch.Tensor):
            return view.numbers[..., rows, columns].float() * scales
        numbers = view.numbers.take(rows, columns)
        if view.kind == "fp4":
            return _look_up(torch.tensor(FP4, device=numbers.device), numbers) * scales
        if isinstance(view.zeros, int):
            return (numbers.float() - view.zeros) * scales
        return (numbers.float() - view._of_groups(view._zeros(view.zeros), rows, columns)) * scales

    def rows(self, part: Part = WHOLE) -> QuantisedRows | None:
        """Return a part of a matrix in the format of the CPU kernels; None if they have none for it, or the part cuts a group of
        32 columns.

        Scales are rounded to float16, and so are the minima of groups with zero points: element = scale * level + minimum.
        """
        _, rows, columns = self._cut(part)
        width = self.shape[-1]
        start, stop, _ = columns.indices(width)
        fits = self.kind == "integer" and self.group_of_column is None and self.factor is None
        whole_groups = self.group[1] % GROUP == 0 or self.group[1] >= width
        if not fits or not whole_groups or start % GROUP or (stop % GROUP and stop != width):
            return None
        assert isinstance(self.numbers, Packed)
        middle = 1 << (self.numbers.bits - 1)
        format = _FORMATS[self.numbers.bits, self.zeros == middle]
        scales = self._of_groups(self._numbers_of(self.scales), rows, columns, step=GROUP)
        stored = scales.half()
        if not stored.is_meta and not stored.isfinite().all():
            return None
        minima = None
        if self.zeros != middle:
            zeros = (
                self.zeros
                if isinstance(self.zeros, int)
                else self._of_groups(self._zeros(self.zeros), rows, columns, step=GROUP)
            )
            minima = (scales * zeros).neg().half()
        levels = self.numbers.take(rows, columns)
        padding, zero = -levels.shape[1] % GROUP, middle if minima is None else 0
        return QuantisedRows(
            format=format,
            levels=F.pad(levels, (0, padding), value=zero) if padding else levels,
            scales=stored,
            minima=minima,
            width=stop - start,
        )

    def gpu_rows(self, part: Part = WHOLE) -> GpuRows | None:
        """Return a part of a matrix in the format of the GPU kernels; None if they have none for it, or the part cuts its groups in
        pieces that they do not have.

        Scales of groups are rounded to bfloat16, those of rows are not. With activation order, columns are sorted by their groups.
        """
        view, rows, columns = self._cut(part)
        (start, stop, _), width = columns.indices(self.shape[-1]), self.shape[-1]
        size, order = self._gpu_group(start, stop), None
        if self.group_of_column is not None:
            order, view = self._order(), replace(view, group_of_column=None)
            size = None if order is None or stop - start < width else size
        if size is None:
            return None
        numbers: Numbers
        if isinstance(view.numbers, Packed):
            numbers = "fp4" if self.kind == "fp4" else "int4" if view.numbers.bits == 4 else "int8"
            levels = view.numbers.take(rows, columns)
        else:
            numbers, levels = "fp8", view.numbers.view(torch.uint8)[rows, columns]
        levels = levels.contiguous() if order is None else levels[:, order]
        zeros, scales = None, None
        if isinstance(self.zeros, Packed):
            zeros = view._of_groups(view._zeros(self.zeros), rows, columns, step=size).to(torch.uint8)
        row_scales = None if self.factor is None else self.factor.float().reshape(1).repeat(len(levels))
        if self.group[1] >= width:
            row_scales = view._of_groups(view._numbers_of(self.scales), rows, columns, step=width)[:, 0].contiguous()
        else:
            scales = view._gpu_scales(rows, columns, size)
        found = GpuRows(
            numbers=numbers,
            levels=levels,
            group=size,
            scales=scales,
            zeros=zeros,
            row_scales=row_scales,
            input_scales=None
            if self.input_scale is None or scales is not None
            else self.input_scale.repeat(len(levels)),
            order=order,
        )
        return found.without_empty_groups()

    def _gpu_group(self, start: int, stop: int) -> int | None:
        """Return the columns that GPU kernels take as a group, of which groups of the columns [start, stop) are made; None if these
        are none of their sizes."""
        width, is_fp4 = self.shape[-1], self.kind == "fp4"
        if isinstance(self.numbers, torch.Tensor) and self.numbers.dtype != torch.float8_e4m3fn:
            return None
        if self.group[1] >= width:
            return None if is_fp4 else _GPU_GROUPS[0]
        fits = (
            size
            for size in (_GPU_GROUPS[2:] if is_fp4 else _GPU_GROUPS[:3])
            if self.group[1] % size == 0 and start % size == 0 and (stop % size == 0 or stop == width)
        )
        return next(fits, None)

    def _order(self) -> torch.Tensor | None:
        """Return the columns sorted by their groups; None if a group but the last is not full."""
        assert self.group_of_column is not None
        if self.group_of_column.is_meta:
            return self.group_of_column
        is_full = torch.bincount(self.group_of_column)[:-1] == self.group[1]
        return self.group_of_column.argsort(stable=True) if bool(is_full.all()) else None

    def _gpu_scales(self, rows: slice, columns: slice, size: int) -> torch.Tensor:
        """Return the scales of groups of `size` columns as GPU kernels take them: those of fp4 as stored, without the factor."""
        if self.kind != "fp4":
            return self._of_groups(self._numbers_of(self.scales), rows, columns, step=size).bfloat16()
        dtype = torch.float8_e8m0fnu if self.scales.dtype == torch.uint8 else self.scales.dtype
        return self._of_groups(self.scales.view(dtype), rows, columns, step=size)

    def mxfp4(self, part: Part = WHOLE) -> Mxfp4Tensors | None:
        """Return a part as stored if it is MXFP4 and the part has whole groups; otherwise None."""
        view, rows, columns = self._cut(part)
        start, stop, _ = columns.indices(self.shape[-1])
        is_mxfp4 = self.kind == "fp4" and self.group == (1, GROUP) and self.scales.itemsize == 1 and self.factor is None
        if not is_mxfp4 or self.scales.dtype == torch.float8_e4m3fn or start % GROUP or stop % GROUP:
            return None
        assert isinstance(view.numbers, Packed)
        blocks = view.numbers.words.view(torch.uint8)[..., rows, start // 2 : stop // 2]
        return blocks, view.scales.view(torch.uint8)[..., rows, start // GROUP : stop // GROUP]

    def _cut(self, part: Part) -> tuple[QuantisedTensor, slice, slice]:
        """Return the tensor with this part of the leading axes, and the part's rows and columns."""
        *leading, rows, columns = (*part, *[ALL] * (len(self.shape) - len(part)))
        # whole axes by their lengths: the last word may have room for more numbers than there are
        rows, columns = (
            slice(*one.indices(size)[:2]) for one, size in zip((rows, columns), self.shape[-2:], strict=True)
        )
        if not leading:
            return self, rows, columns
        numbers, at = self.numbers, tuple(leading)
        cut = numbers[at] if isinstance(numbers, torch.Tensor) else replace(numbers, words=numbers.words[at])
        return replace(self, numbers=cut, scales=self.scales[at]), rows, columns

    def _of_groups(self, of_group: torch.Tensor, rows: slice, columns: slice, *, step: int = 1) -> torch.Tensor:
        """Return `of_group` [..., groups of rows, groups of columns] for each of these rows and each `step`-th of these columns."""
        num_rows, num_columns = self.shape[-2:]
        start, stop, _ = columns.indices(num_columns)
        chosen = torch.arange(start, stop, step)
        groups = chosen // self.group[1] if self.group_of_column is None else self.group_of_column[chosen]
        of_row = torch.arange(num_rows)[rows] // self.group[0]
        device = of_group.device
        return of_group.index_select(-2, of_row.to(device)).index_select(-1, groups.to(device))

    def _numbers_of(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales as float32 numbers, times the factor."""
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        if scales.dtype == torch.uint8:
            powers = torch.ldexp(torch.ones(256), torch.arange(256) - _EXPONENT_BIAS)
            return _look_up(powers.to(scales.device), scales)
        return scales.float() if self.factor is None else scales.float() * self.factor.float()

    def _zeros(self, zeros: Packed) -> torch.Tensor:
        """Return the zero points of all groups, [groups of rows, groups of columns] float32."""
        return zeros.take(slice(0, self.scales.shape[-2])).float()


def _covering(numbers: slice, total: int, each: int) -> tuple[slice, slice]:
    """Return the range of words of `each` numbers that hold these numbers, and the range of the numbers within those words.

    Numbers 40 to 70 in words of 32 are in words [1, 3), at [8, 38).
    """
    start, stop, _ = numbers.indices(total)
    first = start // each
    return slice(first, -(-stop // each)), slice(start - first * each, stop - first * each)


def _look_up(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return `table[indices]`; on a CPU, `index_select` is five times as fast as indexing."""
    return table.index_select(0, indices.flatten().int()).view(indices.shape)
