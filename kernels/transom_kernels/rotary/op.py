"""`rotary_`: rotate pairs (i, i + D/2) of each head.

Legend: T tokens, H heads, D head width.
"""

from __future__ import annotations

import torch


def rotary_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotate `x` [T, H, D], which may be strided, in place.

    `cos` and `signed_sin` are [T, 1 or H, D] in x's dtype; `signed_sin` is the sine with its first half negated.

    Raises:
        ValueError: an odd width or tables that do not fit.
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"head width {width} is odd; rotary needs pairs.")
    if cos.shape != signed_sin.shape or cos.shape[-1] != width or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)} needs tables [{x.shape[0]}, 1 or {x.shape[1]}, {width}]; "
            f"got {tuple(cos.shape)} and {tuple(signed_sin.shape)}."
        )
    swapped = x.roll(width // 2, dims=-1).mul_(signed_sin)
    torch.addcmul(swapped, x, cos, out=x)
