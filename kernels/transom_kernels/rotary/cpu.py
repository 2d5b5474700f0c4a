"""Launches of the CPU kernels of rotary position embedding (RoPE).

Legend: T tokens, H heads, R rotated width.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch

ITEM_ELEMENTS = 2048  # about as many elements as one item of work rotates
TABLE_ELEMENTS = 256  # about as many angles as one item of work turns into cosine and sine

_KERNELS = "transom_kernels.rotary.cpu_kernel"


def tables_fit(positions: torch.Tensor, frequency: torch.Tensor, sign: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes these dtypes and strides."""
    return (
        dtype in DTYPES
        and positions.dtype == torch.int64
        and all(part.dtype == torch.float32 for part in (frequency, sign))
        and all(part.is_contiguous() for part in (positions, frequency, sign))
    )


def rotary_tables_cpu(
    positions: torch.Tensor, frequency: torch.Tensor, sign: torch.Tensor, dtype: torch.dtype, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is that of `tables.rotary_tables`."""
    tokens, width = len(positions), len(frequency)
    cos, signed_sin = (empty((tokens, 1, width), dtype) for _ in range(2))
    per_item = max(1, TABLE_ELEMENTS // width)
    launch(
        cpu_kernel(_KERNELS, "make_tables", dtype=DTYPES[dtype]),
        -(-tokens // per_item),
        [positions, frequency, sign, cos, signed_sin, tokens, per_item, width, float(scale)],
    )
    return cos, signed_sin


def rotary_fits(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> bool:
    """Whether the kernel takes these dtypes and strides."""
    same = x.dtype == cos.dtype == signed_sin.dtype and cos.stride() == signed_sin.stride()
    return same and x.dtype in DTYPES and x.stride(2) == 1 and cos.stride(2) == 1


def rotary_cpu_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False) -> None:
    """The contract is that of `op.rotary_`."""
    (tokens, heads, _), width, size = x.shape, cos.shape[-1], x.element_size()
    per_item = max(1, min(heads, ITEM_ELEMENTS // width))
    launch(
        cpu_kernel(_KERNELS, "make_rotate_heads", dtype=DTYPES[x.dtype], interleaved=interleaved),
        tokens * -(-heads // per_item),
        [
            x, cos, signed_sin, heads, width, per_item, x.stride(0) * size, x.stride(1) * size, cos.stride(0) * size,
            cos.stride(1) * size if cos.shape[1] > 1 else 0,
        ],
    )  # fmt: skip
