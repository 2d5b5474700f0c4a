"""Launches the CPU kernel `prepare_and_write`, which norms and rotates queries and keys and writes keys and values into the KV
cache, and declares its arguments.

Legend: T tokens, H query heads, KVH KV heads, D key width, Dv value width, R rotated width, P block size in tokens.
"""

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import CacheArguments, RowArguments, numbers_of
from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.kv_write.reference import QkvInputs, block_of
from transom_kernels.quantised_kv import STORED

ITEM_ELEMENTS = 2048  # about as many elements as one work item prepares


class PrepareArguments(NamedTuple):
    """The argument words of the kernel `prepare_and_write`."""

    q: RowArguments  # [T, H, D]
    k: RowArguments  # [T, KVH, D]
    v: RowArguments  # [T, KVH, Dv]
    q_out: torch.Tensor  # [T, H, D], contiguous
    keys: CacheArguments
    values: CacheArguments
    key_scales: CacheArguments  # of quantised caches
    value_scales: CacheArguments
    slots: torch.Tensor  # [T] int64; below 0: not written
    cos: RowArguments  # [T, R]
    signed_sin: RowArguments
    q_weight: torch.Tensor | None  # [H, D]
    k_weight: torch.Tensor | None  # [KVH, D]
    query_scale: torch.Tensor | None  # [T]
    heads: int  # H
    kv_heads: int  # KVH
    value_heads: int  # KVH, or 0: only keys are written
    heads_per_item: int
    width: int  # D
    value_width: int  # Dv
    rotated: int  # R
    first_rotated: int  # the first element of a head that is rotated
    block_size: int  # P
    norm: bool  # this and the next four are fields of `Preparation`
    norm_after: bool
    value_norm: bool
    value_factor: float
    eps: float
    hadamard_block: int  # width of the Hadamard matrix's blocks; 0: none


AT = numbers_of(PrepareArguments)


def fits_cpu_kernel(inputs: QkvInputs) -> bool:
    """Return whether the kernel takes these dtypes and strides; the heads of a token must be adjacent."""
    how, tables, query_scale = inputs.preparation, inputs.tables, inputs.query_scale
    weights = [weight for weight in (how.q_weight, how.k_weight) if weight is not None]
    caches = [cache for cache in (inputs.k_cache, inputs.v_cache) if cache is not None]
    return (
        inputs.q.dtype in DTYPES
        and (query_scale is None or (query_scale.dtype == inputs.q.dtype and query_scale.is_contiguous()))
        and _alike(inputs.k, inputs.v)
        and all(cache.dtype in STORED and cache.stride(3) == 1 for cache in caches)
        and (tables is None or (_alike(*tables) and tables[0].stride(-1) == tables[1].stride(-1) == 1))
        and (not weights or (_alike(weights[0], weights[-1]) and all(weight.is_contiguous() for weight in weights)))
        and inputs.slots.dtype == torch.int64
        and inputs.slots.is_contiguous()
    )


def prepare_qkv_cpu(inputs: QkvInputs) -> torch.Tensor:
    """Norm, rotate and scale `q` [T, H, D], `k` [T, KVH, D] and `v` [T, KVH, Dv]; write keys and values; return the queries.

    Keys and values go to the cache slots `inputs.slots`, even if there are 0 query heads. `cpu_kernel.py` has the formulas.
    """
    q, k, v, how = inputs.q, inputs.k, inputs.v, inputs.preparation
    tokens, heads, width = q.shape
    kv_heads, value_heads = (0 if rows is None else rows.shape[1] for rows in (k, v))
    value_width = 0 if v is None else v.shape[2]
    cos, signed_sin = inputs.tables or (None, None)
    rotated = 0 if cos is None else cos.shape[-1]
    weights = [weight for weight in (how.q_weight, how.k_weight) if weight is not None]
    q_out = empty(q.shape, q.dtype) if heads else q
    all_heads = heads + kv_heads + value_heads
    # at least one head, even if a head is wider than ITEM_ELEMENTS
    heads_per_item = max(1, min(all_heads, ITEM_ELEMENTS // max(width, value_width)))
    kv_dtype = DTYPES[(q if k is None else k).dtype]
    kernel = cpu_kernel(
        "transom_kernels.kv_write.cpu_kernel",
        "make_prepare_and_write",
        dtype=DTYPES[q.dtype],
        kv_dtype=kv_dtype,
        cache_dtype=kv_dtype if inputs.k_cache is None else STORED[inputs.k_cache.dtype],
        table_dtype=kv_dtype if cos is None else DTYPES[cos.dtype],
        weight_dtype=DTYPES[weights[0].dtype] if weights else kv_dtype,
        interleaved=how.interleaved,
    )
    arguments = PrepareArguments(
        q=RowArguments.of(q),
        k=RowArguments.of(k),
        v=RowArguments.of(v),
        q_out=q_out,
        keys=CacheArguments.of(inputs.k_cache),
        values=CacheArguments.of(inputs.v_cache),
        key_scales=CacheArguments.of(inputs.k_scale),
        value_scales=CacheArguments.of(inputs.v_scale),
        slots=inputs.slots,
        cos=RowArguments.of(cos),
        signed_sin=RowArguments.of(signed_sin),
        q_weight=how.q_weight,
        k_weight=how.k_weight,
        query_scale=inputs.query_scale,
        heads=heads,
        kv_heads=kv_heads,
        value_heads=value_heads,
        heads_per_item=heads_per_item,
        width=width,
        value_width=value_width,
        rotated=rotated,
        first_rotated=width - rotated if how.rotates_last else 0,
        block_size=0 if inputs.k_cache is None else inputs.k_cache.shape[1],
        norm=how.norm,
        norm_after=how.norm_after_rotation,
        value_norm=how.value_norm,
        value_factor=float(how.value_factor),
        eps=float(how.eps),
        hadamard_block=block_of(width) if how.hadamard else 0,
    )
    num_items = tokens * -(-all_heads // heads_per_item)
    # scratch: one head in float32, padded to whole vectors of 16
    launch(kernel, num_items, arguments, scratch_bytes=4 * (max(width, value_width) + 16))
    return q_out


def _alike(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Return whether the given tensors have the same dtype and the kernel supports it."""
    if x is None or y is None:
        return all(part is None or part.dtype in DTYPES for part in (x, y))
    return x.dtype == y.dtype and x.dtype in DTYPES
