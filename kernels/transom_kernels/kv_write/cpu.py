"""Launches of the CPU kernel `prepare_and_write`.

Legend: T tokens, H query heads, KVH KV heads, D key width, E value width, P block size in tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.kv_write.hadamard import block_of
from transom_kernels.kv_write.prepare import PLAIN, Preparation
from transom_kernels.quantised_kv import STORED

ITEM_ELEMENTS = 2048  # about as many elements as one item of work prepares


def prepare_qkv_fits(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    preparation: Preparation = PLAIN,
    query_scale: torch.Tensor | None = None,
) -> bool:
    """Whether the kernel takes these dtypes and strides; the heads of a token must be adjacent."""
    weights = [weight for weight in (preparation.q_weight, preparation.k_weight) if weight is not None]
    return (
        q.dtype in DTYPES
        and (query_scale is None or (query_scale.dtype == q.dtype and query_scale.is_contiguous()))
        and _alike(k, v)
        and all(cache is None or cache.dtype in STORED for cache in (k_cache, v_cache))
        and (k_cache is None or k_cache.stride(3) == 1)
        and (v_cache is None or v_cache.stride(3) == 1)
        and (tables is None or (_alike(*tables) and tables[0].stride(-1) == tables[1].stride(-1) == 1))
        and (not weights or (_alike(weights[0], weights[-1]) and all(weight.is_contiguous() for weight in weights)))
        and slots.dtype == torch.int64
        and slots.is_contiguous()
    )


def prepare_qkv_cpu(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    preparation: Preparation = PLAIN,
    query_scale: torch.Tensor | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """The contract is that of `op.prepare_qkv`. With 0 query heads keys and values are written all the same."""
    tokens, heads, width = q.shape
    kv_heads, value_heads = (0 if rows is None else rows.shape[1] for rows in (k, v))
    value_width, rotated = 0 if v is None else v.shape[2], 0 if tables is None else tables[0].shape[-1]
    q_out = empty(q.shape, q.dtype) if heads else q
    cos, signed_sin = tables or (None, None)
    weights = [weight for weight in (preparation.q_weight, preparation.k_weight) if weight is not None]
    all_heads = heads + kv_heads + value_heads
    per_item = max(1, min(all_heads, ITEM_ELEMENTS // max(width, value_width)))
    kv_dtype = DTYPES[(q if k is None else k).dtype]
    cache_dtype = kv_dtype if k_cache is None else STORED[k_cache.dtype]
    k_scale, v_scale = kv_scales or (None, None)
    kernel = cpu_kernel(
        "transom_kernels.kv_write.cpu_kernel",
        "make_prepare_and_write",
        dtype=DTYPES[q.dtype],
        kv_dtype=kv_dtype,
        cache_dtype=cache_dtype,
        table_dtype=kv_dtype if cos is None else DTYPES[cos.dtype],
        weight_dtype=DTYPES[weights[0].dtype] if weights else kv_dtype,
        interleaved=preparation.interleaved,
    )
    launch(
        kernel,
        tokens * -(-all_heads // per_item),
        [
            q, k, v, q_out, k_cache, v_cache, slots, cos, signed_sin, preparation.q_weight, preparation.k_weight, query_scale,
            heads, kv_heads, value_heads, width, value_width, rotated, width - rotated if preparation.rotates_last else 0,
            0 if k_cache is None else k_cache.shape[1], per_item,
            _row_stride(q), _row_stride(k), _row_stride(v), *_cache_strides(k_cache), *_cache_strides(v_cache),
            _row_stride(cos), _row_stride(signed_sin), preparation.norm, preparation.norm_after_rotation, preparation.value_norm,
            float(preparation.value_factor), preparation.eps, k_scale, *_cache_strides(k_scale), v_scale, *_cache_strides(v_scale),
            block_of(width) if preparation.hadamard else 0,
        ],
        scratch_bytes=4 * (max(width, value_width) + 16),
    )  # fmt: skip
    return q_out


def kv_write_cpu(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """The contract is that of `op.kv_write`; the heads of a token must be adjacent."""
    prepare_qkv_cpu(k[:, :0], k, v, k_cache, v_cache, slots, kv_scales=kv_scales)


def _alike(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Whether both tensors, if there are any, have one dtype, which the kernel knows."""
    if x is None or y is None:
        return all(part is None or part.dtype in DTYPES for part in (x, y))
    return x.dtype == y.dtype and x.dtype in DTYPES


def _row_stride(x: torch.Tensor | None) -> int:
    """The first stride of a tensor, in bytes."""
    return 0 if x is None else x.stride(0) * x.element_size()


def _cache_strides(cache: torch.Tensor | None) -> tuple[int, int, int]:
    """The strides of blocks, tokens and heads of a cache or its scales, in bytes."""
    if cache is None:
        return 0, 0, 0
    block, token, head = cache.stride()[:3]
    size = cache.element_size()
    return block * size, token * size, head * size
