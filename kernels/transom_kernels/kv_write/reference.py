"""The arguments of `prepare_qkv` and `kv_write`, and the operators in torch and float32: the specification, and the fallback where
no kernel runs.

The *Hadamard rotation* of query and key heads spreads the outlier channels of keys before they are quantised to 4 bits. Its
matrix M is symmetric and orthonormal, so it is its own inverse: (q M) . (k M) = q . k, and rotation does not change scores. Blocks
along its diagonal are as wide as the largest power of two that divides the head's width. A head of width 6 has three blocks:

    [1  1]
    [1 -1] / sqrt(2)

Legend: T tokens, H query heads, KVH KV heads, D key width, Dv value width, R rotated width, P block size in tokens.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from transom_kernels.quantised_kv import FORMATS, check_cache, head_width, quantise_rows


@dataclass(
    frozen=True, slots=True, kw_only=True, eq=False
)  # eq=False: a layer's own is found in a dict by its identity
class Preparation:
    """The steps that a layer applies to queries, keys and values before attention; the default is none.

    Order: RMS norm of each head, rotation (RoPE), a second norm without a weight, the Hadamard rotation (`reference.py`).
    """

    norm: bool = False  # RMS norm of each query and key head, before rotation (QK norm)
    q_weight: torch.Tensor | None = None  # [H, D], with `norm`
    k_weight: torch.Tensor | None = None  # [KVH, D], with `norm`
    norm_after_rotation: bool = False  # RMS norm of each query and key head without a weight, after rotation
    value_norm: bool = False  # RMS norm of each value head without a weight
    value_factor: float = 1.0  # multiplies values
    eps: float = 1e-6
    interleaved: bool = False  # rotary pairs are (2i, 2i + 1), not (i, i + R / 2)
    rotates_last: bool = False  # the last elements of a head are rotated, not the first
    hadamard: bool = False  # query and key heads are multiplied by the Hadamard matrix, last


PLAIN = Preparation()


@dataclass(slots=True, kw_only=True)
class QkvInputs:
    """Queries, keys and values, and the caches to write to. Without `v` only keys are written, without `k` nothing is written."""

    q: torch.Tensor  # [T, H, D]; H may be 0
    slots: torch.Tensor  # [T] int64: block * P + offset; below 0: not written
    k: torch.Tensor | None = None  # [T, KVH, D]
    v: torch.Tensor | None = None  # [T, KVH, Dv]
    k_cache: torch.Tensor | None = None  # [ids, P, KVH, D], any strides
    v_cache: torch.Tensor | None = None  # [ids, P, KVH, Dv]
    # cosines and signed sines [T, R] or [T, 1, R] (see `rotary_`)
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    preparation: Preparation = PLAIN
    query_scale: torch.Tensor | None = None  # [T]: multiplies queries
    k_scale: torch.Tensor | None = None  # [ids, P, KVH] float32: scales of quantised keys (`quantised_kv.format`)
    v_scale: torch.Tensor | None = None
    # Launches that were prepared for these caches; calls with one `preparation` are those of a layer.
    launches: dict[Any, Any] | None = None

    @property
    def heads_are_adjacent(self) -> bool:
        """Return whether the heads of each token are contiguous and follow one another in memory without gaps."""
        rows = [rows for rows in (self.q, self.k, self.v) if rows is not None]
        return all(x.stride(2) == 1 and (x.shape[1] < 2 or x.stride(1) == x.shape[2]) for x in rows)

    def check_heads(self) -> None:
        """Raise ValueError unless queries and keys have equal T and D, and the heads of each token are adjacent."""
        q, k, v = self.q, self.k, self.v
        if (k is not None and q.shape[::2] != k.shape[::2]) or not self.heads_are_adjacent:
            parts = [(tuple(rows.shape), rows.stride()) for rows in (q, k, v) if rows is not None]
            raise ValueError(
                f"q, k and v have shapes and strides {parts}: give equally wide heads that follow each other in memory."
            )

    def check(self, *, rounds: bool) -> None:
        """Raise ValueError unless keys fit the key cache and its scales, and values fit the value cache and its scales.

        With `rounds` float32 rows may go to a cache of fewer bits: they are rounded when they are written.
        """
        k, v, k_cache, v_cache = self.k, self.v, self.k_cache, self.v_cache
        if (v is None) != (v_cache is None) or (k is None) != (k_cache is None) or (k is None and v is not None):
            raise ValueError(
                "k and k_cache belong together, and v and v_cache: give both or neither, and no v without k."
            )
        for name, rows, own_cache, scale in (("k", k, k_cache, self.k_scale), ("v", v, v_cache, self.v_scale)):
            if rows is None or own_cache is None:
                continue
            width = head_width(own_cache)
            if rows.shape[1:] != (*own_cache.shape[2:3], width):
                raise ValueError(
                    f"{name} {tuple(rows.shape)} does not fit {name}_cache {tuple(own_cache.shape)} of heads of {width} numbers: "
                    "heads and widths must agree."
                )
            rounded = rounds and scale is None and rows.dtype == torch.float32 and own_cache.dtype not in FORMATS
            check_cache(name, own_cache.dtype if rounded else rows.dtype, own_cache, scale)
            if len(rows) != len(self.slots):
                raise ValueError(
                    f"{name} has {len(rows)} tokens, but there are {len(self.slots)} slots: give one per token."
                )
        if k_cache is not None and v_cache is not None and k_cache.dtype != v_cache.dtype:
            raise ValueError(f"The caches are {k_cache.dtype} and {v_cache.dtype}; keys and values need one dtype.")


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
