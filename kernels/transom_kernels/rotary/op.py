"""The operators of rotary position embedding (RoPE): `rotary_tables` makes a step's cosines and sines, `rotary_` rotates heads.

For each pair (i, j) of a head: x[i], x[j] = x[i] cos[i] + x[j] signed_sin[i],  x[j] cos[j] + x[i] signed_sin[j].
Pairs are (i, i + R / 2), or (2i, 2i + 1) if interleaved. `signed_sin` is the sine, negated for the first element of each pair.

Legend: T tokens, H heads, D head width, R rotated width.
"""

from typing import Any

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.cpu.rows import make_rotate
from transom_kernels.cpu.simd import NUM_BYTES, STORE_PART, cosine, float_of_bits, load_i64, load_part_f32, sine, splat
from transom_kernels.cpu.work import argument, each_item
from transom_kernels.launch import implementation, uses_cpu_kernels, uses_triton


def rotary_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first R of each head's D elements of `x` [T, H, D] in place. `x` may have any strides.

    `cos` and `signed_sin` are [T, 1 or H, R] in the dtype of `x`.

    Raises:
        ValueError: R is odd, or the tables do not fit.
    """
    width = cos.shape[-1]
    if width % 2:
        raise ValueError(f"The rotated width {width} is odd; RoPE rotates pairs of elements.")
    if cos.shape != signed_sin.shape or width > x.shape[-1] or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)} needs tables [{x.shape[0]}, 1 or {x.shape[1]}, at most {x.shape[-1]}]; "
            f"got {tuple(cos.shape)} and {tuple(signed_sin.shape)}."
        )
    if uses_triton(x) and x.stride(2) == 1:
        implementation("rotary.gpu", "rotary_triton_")(x, cos, signed_sin, interleaved=interleaved)
        return
    if uses_cpu_kernels(x) and heads_fit(x, cos, signed_sin):
        rotary_cpu_(x, cos, signed_sin, interleaved=interleaved)
    else:
        x.copy_(rotary_reference(x, cos, signed_sin, interleaved=interleaved))


def rotary_tables(
    positions: torch.Tensor, frequency: torch.Tensor, sign: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos(position * frequency) * scale and sin(position * frequency) * sign * scale, each [T, 1, R] in `dtype`.

    `positions` is [T] int64; `frequency` and `sign` are [R] float32. Everything is computed in float32, and rounded once.
    """
    if uses_cpu_kernels(positions) and tables_fit(positions, frequency, sign, dtype):
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


# --- the CPU kernel and its launch

ITEM_ELEMENTS = 2048  # about as many elements as one work item rotates
TABLE_ELEMENTS = 256  # about as many angles as one work item turns into cosine and sine

_MODULE = "transom_kernels.rotary.op"


def tables_fit(positions: torch.Tensor, frequency: torch.Tensor, sign: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    return (
        dtype in DTYPES
        and positions.dtype == torch.int64
        and all(part.dtype == torch.float32 for part in (frequency, sign))
        and all(part.is_contiguous() for part in (positions, frequency, sign))
    )


def rotary_tables_cpu(
    positions: torch.Tensor, frequency: torch.Tensor, sign: torch.Tensor, dtype: torch.dtype, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos(position * frequency) * scale and sin(position * frequency) * sign * scale, each [T, 1, R] in `dtype`."""
    tokens, width = len(positions), len(frequency)
    cos, signed_sin = (empty((tokens, 1, width), dtype) for _ in range(2))
    per_item = max(1, TABLE_ELEMENTS // width)
    launch(
        cpu_kernel(_MODULE, "make_tables", dtype=DTYPES[dtype]),
        -(-tokens // per_item),
        [positions, frequency, sign, cos, signed_sin, tokens, per_item, width, float(scale)],
    )
    return cos, signed_sin


def heads_fit(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> bool:
    """Return whether the kernel takes these dtypes and strides."""
    same = x.dtype == cos.dtype == signed_sin.dtype and cos.stride() == signed_sin.stride()
    return same and x.dtype in DTYPES and x.stride(2) == 1 and cos.stride(2) == 1


def rotary_cpu_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, *, interleaved: bool = False) -> None:
    """Rotate the first R elements of each head of `x` [T, H, D] in place, by tables [T, 1 or H, R]."""
    (tokens, heads, _), width, size = x.shape, cos.shape[-1], x.element_size()
    per_item = max(1, min(heads, ITEM_ELEMENTS // width))
    launch(
        cpu_kernel(_MODULE, "make_rotate_heads", dtype=DTYPES[x.dtype], interleaved=interleaved),
        tokens * -(-heads // per_item),
        [
            x, cos, signed_sin, heads, width, per_item, x.stride(0) * size, x.stride(1) * size, cos.stride(0) * size,
            cos.stride(1) * size if cos.shape[1] > 1 else 0,
        ],
    )  # fmt: skip


def make_tables(dtype: str) -> Any:
    """Build the kernel of `rotary_tables_cpu`. A work item is a group of tokens.

    Arguments: 0 positions [T] int64, 1 frequency [R] float32, 2 sign [R] float32, 3 cos, 4 signed_sin, both contiguous [T, R],
    5 T, 6 tokens of an item, 7 R, 8 scale.
    """
    store_part, size = STORE_PART[dtype], NUM_BYTES[dtype]

    @each_item
    def tables(arguments, thread, item):
        width, scale = argument(arguments, 7), splat(float_of_bits(argument(arguments, 8)))
        first = item * argument(arguments, 6)
        for token in range(first, min(first + argument(arguments, 6), argument(arguments, 5))):
            position = splat(load_i64(argument(arguments, 0) + token * 8))
            for r in range(0, width, 16):
                count = min(width - r, 16)
                angle = position * load_part_f32(argument(arguments, 1) + r * 4, count)
                sign = load_part_f32(argument(arguments, 2) + r * 4, count)
                place = (token * width + r) * size
                store_part(argument(arguments, 3) + place, cosine(angle) * scale, count)
                store_part(argument(arguments, 4) + place, sine(angle) * sign * scale, count)

    return tables


def make_rotate_heads(dtype: str, interleaved: bool) -> Any:
    """Build the kernel of `rotary_cpu_`. A work item is a group of heads of one token.

    Arguments: 0 x, 1 cos, 2 signed_sin, 3 H, 4 R, 5 heads of an item, 6 x's token stride in bytes, 7 its head stride,
    8 the tables' token stride, 9 their head stride.
    """
    rotate = make_rotate(dtype, dtype, interleaved=interleaved)

    @each_item
    def rotate_heads(arguments, thread, item):
        heads, rotated, per_item = argument(arguments, 3), argument(arguments, 4), argument(arguments, 5)
        parts = (heads + per_item - 1) // per_item
        token, first = item // parts, item % parts * per_item
        row = argument(arguments, 0) + token * argument(arguments, 6)
        for head in range(first, min(first + per_item, heads)):
            table = token * argument(arguments, 8) + head * argument(arguments, 9)
            cos, signed_sin = argument(arguments, 1) + table, argument(arguments, 2) + table
            rotate(row + head * argument(arguments, 7), cos, signed_sin, rotated)

    return rotate_heads
