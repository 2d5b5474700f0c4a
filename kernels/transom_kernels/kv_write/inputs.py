"""The arguments that `prepare_qkv` and `kv_write` pass to their implementations, and the check that they fit together.

Legend: T tokens, H query heads, KVH KV heads, D key width, Dv value width, R rotated width, P block size in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transom_kernels.quantised_kv import FORMATS, check_cache, head_width


@dataclass(frozen=True, slots=True, kw_only=True)
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
        for name, rows, cache, scale in (("k", k, k_cache, self.k_scale), ("v", v, v_cache, self.v_scale)):
            if rows is None or cache is None:
                continue
            width = head_width(cache)
            if rows.shape[1:] != (*cache.shape[2:3], width):
                raise ValueError(
                    f"{name} {tuple(rows.shape)} does not fit {name}_cache {tuple(cache.shape)} of heads of {width} numbers: "
                    "heads and widths must agree."
                )
            rounded = rounds and scale is None and rows.dtype == torch.float32 and cache.dtype not in FORMATS
            check_cache(name, cache.dtype if rounded else rows.dtype, cache, scale)
            if len(rows) != len(self.slots):
                raise ValueError(
                    f"{name} has {len(rows)} tokens, but there are {len(self.slots)} slots: give one per token."
                )
        if k_cache is not None and v_cache is not None and k_cache.dtype != v_cache.dtype:
            raise ValueError(f"The caches are {k_cache.dtype} and {v_cache.dtype}; keys and values need one dtype.")
