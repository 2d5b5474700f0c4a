"""Launches of the kernel `prepare_and_write`.

Legend: T tokens, H query heads, KVH KV heads, D key width, E value width.
"""

from __future__ import annotations

import torch

from transom_kernels.kv_write.hadamard import block_of
from transom_kernels.kv_write.kernel import prepare_and_write
from transom_kernels.kv_write.prepare import PLAIN, Preparation
from transom_kernels.launch import next_power_of_two
from transom_kernels.quantised_kv import format_of, is_packed, refuse_old_device

HEAD_ELEMENTS = 2048  # elements of heads that a program computes


def prepare_qkv_triton(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    preparation: Preparation = PLAIN,
    query_scale: torch.Tensor | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """The contract is that of `op.prepare_qkv`.

    The heads of a token must be adjacent; tokens may have strides. With 0 query heads keys and values are written all the same.
    """
    tokens, heads, width = q.shape
    num_written = sum(rows is not None for rows in (k, v))
    k, k_cache = (q, q[None]) if k is None or k_cache is None else (k, k_cache)  # unused, if nothing is written
    kv_heads = k.shape[1]
    k_scale, v_scale = kv_scales or (None, None)
    k_scale = k_cache if k_scale is None else k_scale  # unused, if the caches are not quantised
    v_scale = k_scale if v_scale is None else v_scale
    kv_format = None if kv_scales is None else format_of(k_cache)
    refuse_old_device(k_cache)
    v, v_cache = (k, k_cache) if v is None or v_cache is None else (v, v_cache)
    value_width, rotated = v.shape[2], 0 if tables is None else tables[0].shape[-1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_d, block_h = head_blocks(max(heads, kv_heads), width)
    parts = -(-heads // block_h) + num_written * -(-kv_heads // block_h)
    cos, sin = tables or (k, k)
    if tokens:
        prepare_and_write[(tokens, parts)](
            q, k, v, q_out, k_cache, v_cache, slots, cos, sin,
            k if preparation.q_weight is None else preparation.q_weight, k if preparation.k_weight is None else
            preparation.k_weight, k if query_scale is None else query_scale, k_scale, v_scale,
            preparation.value_factor, preparation.eps,
            q.stride(0), k.stride(0), v.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            *k_scale.stride()[:3], *v_scale.stride()[:3], BLOCK_SIZE=k_cache.shape[1],
            H=heads, KVH=kv_heads, D=width, E=value_width, R=rotated, BEGIN=width - rotated if preparation.rotates_last else 0,
            INTERLEAVED=preparation.interleaved, NORM=preparation.norm, HAS_Q_WEIGHT=preparation.q_weight is not None,
            HAS_K_WEIGHT=preparation.k_weight is not None, NORM_AFTER=preparation.norm_after_rotation,
            LOG_HADAMARD=block_of(width).bit_length() - 1 if preparation.hadamard else 0,
            VALUE_NORM=preparation.value_norm, HAS_QUERY_SCALE=query_scale is not None,
            TO_INTEGER=not k_cache.is_floating_point(), LARGEST=0.0 if kv_format is None else kv_format.largest,
            PACKED=is_packed(k_cache), BLOCK_H=block_h, BLOCK_D=block_d, BLOCK_E=next_power_of_two(value_width),
            num_warps=4,
        )  # fmt: skip
    return q_out


def head_blocks(num_heads: int, width: int) -> tuple[int, int]:
    """Elements of a head and heads that one program computes, both powers of two."""
    block_d = next_power_of_two(width)
    return block_d, min(next_power_of_two(num_heads), max(1, HEAD_ELEMENTS // block_d))


def kv_write_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """The contract is that of `op.kv_write`; the heads of a token must be adjacent."""
    prepare_qkv_triton(k[:, :0], k, v, k_cache, v_cache, slots, None, kv_scales=kv_scales)
