"""Quantises rows to stored numbers and scales, and back, in torch: the specification. `format.py` has the formats.

Legend: D numbers of a row.
"""

from __future__ import annotations

import torch

from transom_kernels.quantised_kv.format import FORMATS, INT4, KvFormat

_INT4_OFFSET = 8


def quantise_rows(rows: torch.Tensor, kv_format: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [..., D] as elements of a cache [..., D / numbers per element], and their scales [...] in float32.

    Numbers are rounded to nearest, ties to even.

    Raises:
        ValueError: D is not a multiple of the format's numbers per element.
    """
    if rows.shape[-1] % kv_format.numbers_per_element:
        raise ValueError(
            f"Rows have {rows.shape[-1]} numbers; {kv_format.name} packs {kv_format.numbers_per_element} into one byte, so "
            f"give an even width, or choose {' or '.join(f.name for f in FORMATS.values() if f.numbers_per_element == 1)}."
        )
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest.isfinite(), largest / kv_format.largest, torch.nan)
    scaled = torch.where(scale[..., None] > 0, wide / scale[..., None], 0.0).clamp(
        -kv_format.largest, kv_format.largest
    )
    if kv_format is INT4:
        nibbles = scaled.round().to(torch.int16) + _INT4_OFFSET
        return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8), scale
    return (scaled.round() if kv_format.dtype is torch.int8 else scaled).to(kv_format.dtype), scale


def dequantise_rows(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return rows [..., D] in float32 from a cache's elements and their scales [...]."""
    if elements.dtype is INT4.dtype:
        numbers = torch.stack([elements & 15, elements >> 4], dim=-1).flatten(-2).float() - _INT4_OFFSET
    else:
        numbers = elements.float()
    return numbers * scale[..., None]
