"""Quantised matrices in the layout that the Triton kernels read, made once, when a model is loaded. They take as many bytes as
before; only scales and zero points are padded, to blocks of 16 rows by 128 columns.

    words, 4 bits   [experts] [rows] [K / 32] [8] int16: word 2 q + b of 32 columns holds what a thread multiplies, its elements
                    2 q + b + (0, 8, 16, 24) on Hopper, 8 q + b + (0, 2, 4, 6) elsewhere
    words, 8 bits   [experts] [rows] [K / 32] [16] int16: word 4 q + 2 h + b holds elements 16 h + 2 q + b + (0, 8) on Hopper,
                    8 q + 4 h + b + (0, 2) elsewhere
    scales          [experts] [rows / 16] [K / 128] [8 rows] [groups of 128 columns] [rows 0-7, rows 8-15]: a thread's lie together.
                    They are bytes (`widening.POWER_FACTORS`) or factors in bfloat16, two in an int32.
    zero points     as scales: bytes for groups of 32, two in an int32 for larger ones

The first element of a word has the lowest bits. But few operations make bfloat16 numbers of two words of fp4 at a time
(`widened_words`), so these have their bits in another order.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from transom_kernels.launch import capability_of
from transom_kernels.moe.weights import MX_GROUP, ExpertTensors, GpuMatrix, MxTensor, ScaleKind
from transom_kernels.quantised_linear.weights import GpuRows, Numbers

LARGEST_SCALE = 160  # 2 ** 33; see `TWO_TO_32` of `widening.py`
FACTOR_OF_SCALE = {"fp4": 2.0**94, "fp8": 2.0**88, "int4": 2.0**101, "int8": 2.0**101}  # as `widening.NUMBER_FACTORS`
_E8M0, _E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
_KINDS: dict[torch.dtype | None, ScaleKind] = {None: "", _E8M0: "powers", _E4M3: "small", torch.bfloat16: "bfloat16"}
_CHUNK = 128  # columns whose scales lie together
_ROWS_AT_ONCE = 4096  # that are arranged, by way of numbers of 32 bits


def for_gpu(tensors: ExpertTensors) -> ExpertTensors:
    """Return experts whose MXFP4 matrices have the layout above, and alternating gates and ups.

    Raises:
        ValueError: a scale is above 2 ** 33.
    """
    gate_up, down, bias, interleaved = tensors.gate_up, tensors.down, tensors.gate_up_bias, tensors.interleaved
    if isinstance(gate_up, MxTensor):
        rows = torch.arange(gate_up.shape[1], device=gate_up.blocks.device)
        if not interleaved and tensors.has_gates:
            rows = rows.view(2, -1).t().flatten()
            bias = None if bias is None else bias[:, rows]
        gate_up, interleaved = _of_mxfp4(gate_up, rows), True
    if isinstance(down, MxTensor):
        down = _of_mxfp4(down, torch.arange(down.shape[1], device=down.blocks.device))
    return replace(tensors, gate_up=gate_up, down=down, gate_up_bias=bias, interleaved=interleaved)


def _of_mxfp4(matrix: MxTensor, rows: torch.Tensor) -> GpuMatrix:
    if not matrix.scales.is_meta and int(matrix.scales.max()) > LARGEST_SCALE:
        raise ValueError(f"MXFP4 experts have a scale above 2 ** {LARGEST_SCALE - 127}.")
    return arranged(
        GpuRows(numbers="fp4", levels=_halves(blocks[rows]), group=MX_GROUP, scales=scales[rows].view(_E8M0))
        for blocks, scales in zip(matrix.blocks, matrix.scales, strict=True)
    )


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)


def arranged(experts: Iterable[GpuRows]) -> GpuMatrix:
    """Return one matrix per expert in the layout above. All have one format; experts are arranged one by one, since indices take
    much more memory than words."""
    parts: list[tuple[torch.Tensor | None, ...]] = []
    for rows in experts:
        if parts and rows.levels.is_meta:
            parts.append(parts[-1])  # without data all experts are alike
            continue
        factors = None if rows.scales is None else _bits(rows.scales, rows.numbers)
        zeros = rows.zeros if rows.zeros is None or rows.group <= MX_GROUP else rows.zeros.to(torch.int16)
        vectors = (None if part is None else _of_groups(part, rows.group) for part in (factors, zeros))
        words = torch.cat([words_of(some, rows.numbers) for some in rows.levels.split(_ROWS_AT_ONCE)])
        parts.append((words, *vectors, rows.row_scales))
    stacked, scales, zeros, row_scales = (
        None if part[0] is None else torch.stack([each for each in part if each is not None])
        for part in zip(*parts, strict=True)
    )
    assert stacked is not None
    return GpuMatrix(
        numbers=rows.numbers,
        shape=(len(parts), *rows.levels.shape),
        group=rows.group,
        words=stacked,
        scales=scales,
        zeros=zeros,
        row_scales=row_scales,
        scale_kind=_KINDS[None if rows.scales is None else rows.scales.dtype],
    )


def spreads_elements(device: torch.device) -> bool:
    """Return whether a thread holds elements 8 apart, as Hopper's tensor cores read them from registers; others read 8 in a row."""
    return capability_of(device)[0] == 9


def widened_words(words: torch.Tensor) -> list[torch.Tensor]:
    """Return the four fp4 elements of each word, their bits where they are bfloat16 numbers times 2 ** -126: sign, the two lowest
    bits of the exponent, the highest of the fraction. Those bits come from the same word, so the kernels shift two words at once.
    """
    swapped = words << 8 | words >> 8 & 0xFF
    return [word & 0x81C0 for word in (words, words << 4, swapped ^ swapped << 2, swapped ^ swapped << 6)]


def words_of(levels: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """Return rows of numbers [N, K] as words [N, words] int16."""
    is_spread, device = spreads_elements(levels.device), levels.device
    levels = F.pad(levels, (0, -levels.shape[1] % 32)).unflatten(1, (-1, 32)).int()
    if numbers in ("int8", "fp8"):
        split, axes = ([2, 2, 4, 2], [0, 1, 4, 2, 5, 3]) if is_spread else ([4, 2, 2, 2], [0, 1, 2, 3, 5, 4])
    else:
        split, axes = ([4, 4, 2], [0, 1, 3, 4, 2] if is_spread else [0, 1, 2, 4, 3])
    # elements of all words, [N, words] each
    elements = levels.view(*levels.shape[:2], *split).permute(axes).flatten(1, -2).unbind(-1)
    words: Any = sum(each << (16 // len(elements)) * at for at, each in enumerate(elements))
    found: torch.Tensor = words.to(torch.int16) if numbers != "fp4" else _fp4_words(device)[words]
    return found


def _fp4_words(device: torch.device) -> torch.Tensor:
    """Return four elements, the first in the lowest bits -> their word."""
    every = torch.arange(1 << 16, device=device)
    elements = [bits >> 12 & 8 | bits >> 6 & 7 for bits in widened_words(every)]
    word_of = torch.empty_like(every, dtype=torch.int16)
    word_of[sum(element << 4 * e for e, element in enumerate(elements))] = every.to(torch.int16)
    return word_of


def _bits(scales: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """Return scales as the kernels read them. Those in e4m3 get an exponent of five bits, so that small ones are normal numbers."""
    if scales.dtype == torch.bfloat16:
        return (scales.float() * FACTOR_OF_SCALE[numbers]).bfloat16().view(torch.int16)
    if scales.dtype == _E8M0:
        return scales.view(torch.uint8)
    return ((scales.float() * 2.0**-117).view(torch.int32) >> 20).to(torch.uint8)


def _of_groups(values: torch.Tensor, group: int) -> torch.Tensor:
    """Return values of groups [N, G] in the order of scales."""
    padding = (0, -values.shape[1] % (_CHUNK // group), 0, -len(values) % 16)
    blocks = F.pad(values, padding).unflatten(1, (-1, _CHUNK // group)).unflatten(0, (-1, 2, 8))
    ordered: torch.Tensor = blocks.permute(0, 3, 2, 4, 1).flatten(2).contiguous()
    return ordered.view(torch.int32) if values.dtype == torch.int16 else ordered
