"""Launches the Triton kernel `prepare_and_write`.

Legend: T tokens, H query heads, KVH KV heads, D key width, Dv value width.
"""

from __future__ import annotations

import torch

from transom_kernels.kv_write.hadamard import block_of
from transom_kernels.kv_write.inputs import QkvInputs
from transom_kernels.kv_write.kernel import prepare_and_write
from transom_kernels.launch import next_power_of_two
from transom_kernels.quantised_kv import format_of, is_packed, refuse_old_device

HEAD_ELEMENTS = 2048  # elements of heads that a program computes


def prepare_qkv_triton(inputs: QkvInputs) -> torch.Tensor:
    """Norm, rotate and scale `q` [T, H, D], `k` [T, KVH, D] and `v` [T, KVH, Dv], write keys and values, return the queries.

    The heads of a token must be adjacent; tokens may have strides. With 0 query heads keys and values are written all the same.
    `op.prepare_qkv` has the whole contract.
    """
    q, slots, how, query_scale = inputs.q, inputs.slots, inputs.preparation, inputs.query_scale
    tokens, heads, width = q.shape
    num_written = sum(rows is not None for rows in (inputs.k, inputs.v))
    # what is absent is unused, and gets another tensor in its place
    k = q if inputs.k is None else inputs.k
    k_cache = q[None] if inputs.k_cache is None else inputs.k_cache
    v, v_cache = (k if inputs.v is None else inputs.v), (k_cache if inputs.v_cache is None else inputs.v_cache)
    k_scale = k_cache if inputs.k_scale is None else inputs.k_scale
    v_scale = k_scale if inputs.v_scale is None else inputs.v_scale
    cos, sin = inputs.tables or (k, k)
    kv_heads, value_width, rotated = k.shape[1], v.shape[2], 0 if inputs.tables is None else cos.shape[-1]
    kv_format = None if inputs.k_scale is None else format_of(k_cache)
    refuse_old_device(k_cache)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_d, block_h = head_blocks(max(heads, kv_heads), width)
    parts = -(-heads // block_h) + num_written * -(-kv_heads // block_h)
    if tokens:
        prepare_and_write[(tokens, parts)](
            q, k, v, q_out, k_cache, v_cache, slots, cos, sin,
            k if how.q_weight is None else how.q_weight, k if how.k_weight is None else how.k_weight,
            k if query_scale is None else query_scale, k_scale, v_scale,
            how.value_factor, how.eps,
            q.stride(0), k.stride(0), v.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            *k_scale.stride()[:3], *v_scale.stride()[:3], BLOCK_SIZE=k_cache.shape[1],
            H=heads, KVH=kv_heads, D=width, E=value_width, R=rotated, BEGIN=width - rotated if how.rotates_last else 0,
            INTERLEAVED=how.interleaved, NORM=how.norm, HAS_Q_WEIGHT=how.q_weight is not None,
            HAS_K_WEIGHT=how.k_weight is not None, NORM_AFTER=how.norm_after_rotation,
            LOG_HADAMARD=block_of(width).bit_length() - 1 if how.hadamard else 0,
            VALUE_NORM=how.value_norm, HAS_QUERY_SCALE=query_scale is not None,
            TO_INTEGER=not k_cache.is_floating_point(), LARGEST=0.0 if kv_format is None else kv_format.largest,
            PACKED=is_packed(k_cache), BLOCK_H=block_h, BLOCK_D=block_d, BLOCK_E=next_power_of_two(value_width),
            num_warps=4,
        )  # fmt: skip
    return q_out


def head_blocks(num_heads: int, width: int) -> tuple[int, int]:
    """Elements of a head and heads that one program computes, both powers of two."""
    block_d = next_power_of_two(width)
    return block_d, min(next_power_of_two(num_heads), max(1, HEAD_ELEMENTS // block_d))
