"""`rotary`: rotate pairs (i, i + D/2) of each head.

Legend: T tokens, H heads, D head width.
"""

from __future__ import annotations

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotated copy of `x` [T, H, D].

    `cos` and `signed_sin` are [T, 1 or H, D] in x's dtype; `signed_sin` is the sine with its first half negated. Rows with
    cosine 1 and sine 0 pass through, so that values can ride along with queries and keys.

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
    swapped = x.roll(width // 2, dims=-1)
    return swapped.mul_(signed_sin).addcmul_(x, cos)
