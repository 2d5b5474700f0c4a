"""The operator `rotary_`: rotary position embedding, by halves (pairs (i, i + R / 2)) or interleaved (pairs (2i, 2i + 1)).

Legend: T tokens, H heads, D head width, R rotated width.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_cpu_kernels, uses_triton


def rotary_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first R of each head's D elements of `x` [T, H, D] in place. `x` may have strides.

    `cos` and `signed_sin` are [T, 1 or H, R] in the dtype of `x`; `signed_sin` is the sine, negated for the first of each pair.

    Raises:
        ValueError: R is odd, or the tables do not fit.
    """
    width = cos.shape[-1]
    if width % 2:
        raise ValueError(f"rotated width {width} is odd; rotary needs pairs.")
    if cos.shape != signed_sin.shape or width > x.shape[-1] or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)} needs tables [{x.shape[0]}, 1 or {x.shape[1]}, at most {x.shape[-1]}]; "
            f"got {tuple(cos.shape)} and {tuple(signed_sin.shape)}."
        )
    if uses_triton(x) and x.stride(2) == 1:
        from transom_kernels.rotary.gpu import rotary_triton_

        rotary_triton_(x, cos, signed_sin, interleaved=interleaved)
        return
    if uses_cpu_kernels(x):
        from transom_kernels.rotary.cpu import rotary_cpu_, rotary_fits

        if rotary_fits(x, cos, signed_sin):
            rotary_cpu_(x, cos, signed_sin, interleaved=interleaved)
            return
    rotated = x if width == x.shape[-1] else x[..., :width]
    if interleaved:
        swapped = rotated.reshape(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2).mul_(signed_sin)
    else:
        swapped = rotated.roll(width // 2, dims=-1).mul_(signed_sin)
    torch.addcmul(swapped, rotated, cos, out=rotated)
