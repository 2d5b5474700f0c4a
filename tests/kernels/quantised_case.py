"""Quantised caches of random batches: a slab of blocks with keys, values and their scales, poisoned where no token is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transom_kernels.quantised_kv import FORMATS, KvFormat, quantise_rows

FORMATS_BY_NAME = {kv_format.name: kv_format for kv_format in FORMATS.values()}
_POISON = 0x7F  # NaN as an 8-bit float, the largest number of int8


@dataclass(kw_only=True)
class QuantisedCaches:
    """Caches [ids, P, KVH, elements] and scales [ids, P, KVH]: views of one slab."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_scale, self.v_scale

    @property
    def arguments(self) -> dict[str, Any]:
        return {"k_cache": self.k, "v_cache": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}


def poisoned_caches(
    kv_format: KvFormat, ids: int, block_size: int, kv_heads: int, widths: tuple[int, int], *, head_major: bool = True
) -> QuantisedCaches:
    """Every number that reads as NaN where the format has one, and every scale NaN.

    A block has a gap, K, V, the scales of K and of V, and a gap; scales lie as [heads, tokens], as in a worker's blocks.
    """
    elements = [width // kv_format.numbers_per_element for width in widths]
    rows = block_size * kv_heads
    starts, end = [], 16
    for size in (rows * elements[0], rows * elements[1], 4 * rows, 4 * rows):
        starts.append(end)
        end = -(-(end + size) // 16) * 16
    stride = end + 16
    slab = torch.full((ids * stride,), _POISON, dtype=torch.uint8)
    floats = slab.view(torch.float32)

    def values(start: int, width: int) -> torch.Tensor:
        token, head = (width, block_size * width) if head_major else (kv_heads * width, width)
        view = slab.as_strided((ids, block_size, kv_heads, width), (stride, token, head, 1), start)
        return view.view(kv_format.dtype)

    def scales(start: int) -> torch.Tensor:
        view = floats.as_strided((ids, block_size, kv_heads), (stride // 4, 1, block_size), start // 4)
        return view.fill_(float("nan"))

    return QuantisedCaches(
        k=values(starts[0], elements[0]),
        v=values(starts[1], elements[1]),
        k_scale=scales(starts[2]),
        v_scale=scales(starts[3]),
    )


def quantised(case: Any, kv_format: KvFormat, *, head_major: bool = True) -> QuantisedCaches:
    """Quantised keys and values of a case that has `k_cache` and `v_cache`."""
    ids, block_size, kv_heads, width = case.k_cache.shape
    widths = (width, case.v_cache.shape[3])
    caches = poisoned_caches(kv_format, ids, block_size, kv_heads, widths, head_major=head_major)
    for source, cache, scale in ((case.k_cache, caches.k, caches.k_scale), (case.v_cache, caches.v, caches.v_scale)):
        elements, scales = quantise_rows(source, kv_format)
        bytes_of, is_row = cache.view(torch.uint8), scales.isfinite()
        bytes_of[is_row] = elements.view(torch.uint8)[is_row]
        scale[is_row] = scales[is_row]
    return caches
