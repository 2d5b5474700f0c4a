"""Launches of the CPU kernel `prepare_and_write`.

Legend: T tokens, H query heads, KVH KV heads, D key width, E value width, P block size in tokens.
"""

from __future__ import annotations

import torch

from transom_kernels.cpu.kernel import cpu_kernel
from transom_kernels.cpu.launching import DTYPES, empty, launch
from transom_kernels.kv_write.prepare import PLAIN, Preparation

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
    groups = [
        [q if query_scale is None else query_scale, q],
        [rows for rows in (k, v) if rows is not None],
        [cache for cache in (k_cache, v_cache) if cache is not None],
        list(tables or ()),
        weights,
    ]
    return (
        all(len({part.dtype for part in group}) < 2 and part.dtype in DTYPES for group in groups for part in group)
        and all(part.stride(-1) == 1 for group in groups[2:] for part in group)
        and all(weight.is_contiguous() for weight in weights)
        and (query_scale is None or query_scale.is_contiguous())
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
    cache_dtype = kv_dtype if k_cache is None else DTYPES[k_cache.dtype]
    kernel = cpu_kernel(
        "transom_kernels.kv_write.cpu_kernel",
        "make_prepare_and_write",
        dtype=DTYPES[q.dtype],
        kv_dtype=kv_dtype,
        cache_dtype=cache_dtype,
        table_dtype=cache_dtype if cos is None else DTYPES[cos.dtype],
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
            *_strides(q, 1), *_strides(k, 1), *_strides(v, 1), *_strides(k_cache, 3), *_strides(v_cache, 3),
            *_strides(cos, 1), *_strides(signed_sin, 1), preparation.norm, preparation.norm_after_rotation, preparation.value_norm,
            float(preparation.value_factor), preparation.eps,
        ],
        scratch_bytes=4 * (max(width, value_width) + 16),
    )  # fmt: skip
    return q_out


def kv_write_cpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """The contract is that of `op.kv_write`; the heads of a token must be adjacent."""
    prepare_qkv_cpu(k[:, :0], k, v, k_cache, v_cache, slots)


def _strides(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides of a tensor, in bytes."""
    return (0,) * count if x is None else tuple(stride * x.element_size() for stride in x.stride()[:count])
