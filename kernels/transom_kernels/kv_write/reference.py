"""`prepare_qkv` and `kv_write` in torch and float32: the specification, and the fallback where no kernel runs.

The *Hadamard rotation* of query and key heads spreads the outlier channels of keys before they are quantised to 4 bits. Its
matrix M is symmetric and orthonormal, so it is its own inverse: (q M) . (k M) = q . k, and rotation does not change scores. Blocks
along its diagonal are as wide as the largest power of two that divides the head's width. A head of width 6 has three blocks:

    [1  1]
    [1 -1] / sqrt(2)

Legend: T tokens, H query heads, D key width, R rotated width, P block size in tokens.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from transom_kernels.kv_write.inputs import Preparation, QkvInputs
from transom_kernels.quantised_kv import FORMATS, quantise_rows


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """Return heads [..., D] times the Hadamard matrix, computed in float32; the result is contiguous, in the dtype of `x`."""
    width = x.shape[-1]
    block = block_of(width)
    rows = x.float().reshape(*x.shape[:-1], width // block, block)
    return (rows @ _matrix(block, x.device)).flatten(-2).to(x.dtype).contiguous()


def block_of(width: int) -> int:
    """Return the width of the matrix's blocks: the largest power of two that divides the head's width."""
    return width & -width


@cache
def _matrix(width: int, device: torch.device) -> torch.Tensor:
    """Return one block of the matrix, [width, width]; `width` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return (matrix / math.sqrt(width)).to(device)


def prepare_qkv_reference(inputs: QkvInputs) -> torch.Tensor:
    """Norm, rotate and scale as `preparation` says; write keys and values to their slots; return the queries [T, H, D]."""
    how = inputs.preparation
    queries = _prepared(inputs.q, how.q_weight, inputs)
    if inputs.query_scale is not None:
        queries = queries * inputs.query_scale[:, None, None]
    if inputs.k is not None and inputs.k_cache is not None:
        write_rows(_prepared(inputs.k, how.k_weight, inputs), inputs.k_cache, inputs.slots, inputs.k_scale)
    if inputs.v is not None and inputs.v_cache is not None:
        values = _normalised(inputs.v.float(), how.eps) if how.value_norm else inputs.v.float()
        write_rows(values * how.value_factor, inputs.v_cache, inputs.slots, inputs.v_scale)
    return queries.to(inputs.q.dtype)


def write_rows(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Write row `t` to slot `slots[t]` of a cache [ids, P, heads, elements]; quantise it if there is a `scale` [ids, P, heads].

    Rows whose slot is below 0 are not written.
    """
    is_written = slots >= 0
    rows, slots = rows[is_written], slots[is_written]
    place = (slots // cache.shape[1], slots % cache.shape[1])
    if scale is None:
        cache[place] = rows.to(cache.dtype)
        return
    elements, scale[place] = quantise_rows(rows, FORMATS[cache.dtype])
    cache.view(torch.uint8)[place] = elements.view(torch.uint8)  # as bytes, since torch cannot scatter 8-bit floats


def _prepared(x: torch.Tensor, weight: torch.Tensor | None, inputs: QkvInputs) -> torch.Tensor:
    """Return heads [T, heads, D] in float32 after norm, rotation, second norm and Hadamard rotation, as `preparation` says."""
    x, how = x.float(), inputs.preparation
    if how.norm:
        x = _normalised(x, how.eps) * (1.0 if weight is None else weight.float())
    if inputs.tables is not None:
        cos, signed_sin = (table.float().flatten(0, -2)[:, None] for table in inputs.tables)
        x = _rotated(x, cos, signed_sin, how)
    x = _normalised(x, how.eps) if how.norm_after_rotation else x
    return rotate_heads(x) if how.hadamard else x


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor, how: Preparation) -> torch.Tensor:
    """Return heads whose first (or last) R elements are rotated in pairs."""
    width = cos.shape[-1]
    begin = x.shape[-1] - width if how.rotates_last else 0
    before, part, after = x[..., :begin], x[..., begin : begin + width], x[..., begin + width :]
    pairs = part.reshape(*part.shape[:-1], *((width // 2, 2) if how.interleaved else (2, width // 2)))
    swapped = pairs.flip(-1 if how.interleaved else -2).flatten(-2)
    return torch.cat([before, part * cos + swapped * signed_sin, after], dim=-1)
