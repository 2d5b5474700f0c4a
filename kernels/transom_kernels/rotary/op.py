"""The operators of rotary position embedding (RoPE): `rotary_tables` makes a step's cosines and sines, `rotary_` rotates heads.

For each pair (i, j) of a head: x[i], x[j] = x[i] cos[i] + x[j] signed_sin[i],  x[j] cos[j] + x[i] signed_sin[j].
Pairs are (i, i + R / 2), or (2i, 2i + 1) if interleaved. `signed_sin` is the sine, negated for the first element of each pair.

Legend: T tokens, H heads, D head width, R rotated width.
"""

from __future__ import annotations

import torch

from transom_kernels.launch import uses_cpu_kernels, uses_triton


def rotary_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first R of each head's D elements of `x` [T, H, D] in place. `x` may have strides.

    `cos` and `signed_sin` are [T, 1 or H, R] in the dtype of `x`.

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
        from transom_kernels.rotary.cpu import heads_fit, rotary_cpu_

        if heads_fit(x, cos, signed_sin):
            rotary_cpu_(x, cos, signed_sin, interleaved=interleaved)
            return
    x.copy_(rotary_reference(x, cos, signed_sin, interleaved=interleaved))


def rotary_tables(
    positions: torch.Tensor, frequency: torch.Tensor, sign: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos(position * frequency) * scale and sin(position * frequency) * sign * scale, each [T, 1, R] in `dtype`.

    `positions` is [T] int64; `frequency` and `sign` are [R] float32. Everything is computed in float32, and rounded once.
    """
    if uses_cpu_kernels(positions):
        from transom_kernels.rotary.cpu import rotary_tables_cpu, tables_fit

        if tables_fit(positions, frequency, sign, dtype):
            return rotary_tables_cpu(positions, frequency, sign, dtype, scale)
    angles = positions.to(torch.float32)[:, None] * frequency
    cos, signed_sin = angles.cos() * scale, angles.sin() * sign * scale
    return cos.to(dtype)[:, None], signed_sin.to(dtype)[:, None]


def rotary_reference(
    x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Return a rotated copy of `x`: the specification of `rotary_`, in torch."""
    width = cos.shape[-1]
    rotated = x[..., :width]
    if interleaved:
        partners = rotated.reshape(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partners = rotated.roll(width // 2, dims=-1)
    return torch.cat([torch.addcmul(partners * signed_sin, rotated, cos), x[..., width:]], dim=-1)
