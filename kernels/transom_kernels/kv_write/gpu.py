"""Launches the Triton kernel `prepare_and_write`, which norms and rotates queries and keys and writes keys and values into the KV
cache. A launch is prepared once for all layers with equal shapes and options.

Legend: T tokens, H query heads, KVH KV heads, D key width, Dv value width.
"""

from operator import attrgetter
from typing import Any

import torch

from transom_kernels.kv_write.kernel import prepare_and_write
from transom_kernels.kv_write.reference import QkvInputs, block_of
from transom_kernels.launch import next_power_of_two
from transom_kernels.prepared_launch import PreparedLaunch, kept
from transom_kernels.quantised_kv import format_of, is_packed, refuse_old_device

HEAD_ELEMENTS = 2048  # elements of heads that a program computes


def prepare_qkv_triton(inputs: QkvInputs) -> torch.Tensor:
    """Norm, rotate and scale `q` [T, H, D], `k` [T, KVH, D] and `v` [T, KVH, Dv]; write keys and values; return the queries.

    Keys and values go to the cache slots `inputs.slots`, even if there are 0 query heads. The heads of a token must be adjacent;
    tokens may lie any stride apart. `kernel.py` has the formulas.
    """
    q, how = inputs.q, inputs.preparation
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens := q.shape[0]:
        # the kernel does not read absent tensors, but each parameter needs some tensor: another one stands in
        k = q if inputs.k is None else inputs.k
        k_cache = q if inputs.k_cache is None else inputs.k_cache
        v, v_cache = (k if inputs.v is None else inputs.v), (k_cache if inputs.v_cache is None else inputs.v_cache)
        k_scale = k_cache if inputs.k_scale is None else inputs.k_scale
        v_scale = k_scale if inputs.v_scale is None else inputs.v_scale
        cos, sin = inputs.tables or (k, k)
        q_weight = k if how.q_weight is None else how.q_weight
        k_weight = k if how.k_weight is None else how.k_weight
        query_scale = k if inputs.query_scale is None else inputs.query_scale
        launch, parts = _launch(inputs)
        launch(
            (tokens, parts, 1),
            (
                *(q, k, v, q_out, k_cache, v_cache, inputs.slots, cos, sin, q_weight, k_weight, query_scale),
                *(k_scale, v_scale),
            ),
        )
    return q_out


_launches: dict[tuple[Any, ...], tuple[PreparedLaunch, int]] = {}
_SCALARS = attrgetter(
    *("norm", "norm_after_rotation", "value_norm", "value_factor", "eps", "interleaved", "rotates_last", "hadamard")
)  # of a `Preparation`


def _launch(inputs: QkvInputs) -> tuple[PreparedLaunch, int]:
    """Return the launch for these inputs, and the number of programs for each token."""
    q, k = inputs.q, inputs.k
    strides = (q.stride(0), None if k is None else k.stride(0))
    key = (inputs.preparation, q.shape[1], strides, q.dtype, q.shape[0] == inputs.slots.shape[0])
    return kept(inputs.launches, key, _shared_launch, inputs)


def _shared_launch(inputs: QkvInputs) -> tuple[PreparedLaunch, int]:
    """Return the launch for all inputs of these shapes and options, and the number of programs for each token.

    The cache's key is everything that `_prepare` reads and checks.
    """
    how, tensors = inputs.preparation, (inputs.q, inputs.k, inputs.v)
    caches = (inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale)
    key = (
        *[None if rows is None else (rows.shape[1:], rows.stride(), rows.dtype) for rows in tensors],
        *[None if cache is None else (cache.shape, cache.stride(), cache.dtype) for cache in caches],
        *(None if inputs.tables is None else inputs.tables[0].shape[-1], inputs.query_scale is not None),
        *(how.q_weight is not None, how.k_weight is not None, _SCALARS(how)),
        inputs.k is None or inputs.q.shape[0] == inputs.k.shape[0] == inputs.slots.shape[0],
    )
    if key not in _launches:
        _launches[key] = _prepare(inputs)
    return _launches[key]


def _prepare(inputs: QkvInputs) -> tuple[PreparedLaunch, int]:
    """Prepare the launch. Raises ValueError if `inputs` do not fit together or the device does not support the cache's dtype."""
    inputs.check(rounds=True)
    inputs.check_heads()
    how, (_, heads, width) = inputs.preparation, inputs.q.shape
    k = inputs.q if inputs.k is None else inputs.k
    v = k if inputs.v is None else inputs.v
    # stand-ins for absent tensors, as in `prepare_qkv_triton`
    k_cache = inputs.q[None] if inputs.k_cache is None else inputs.k_cache
    v_cache = k_cache if inputs.v_cache is None else inputs.v_cache
    k_scale = k_cache if inputs.k_scale is None else inputs.k_scale
    v_scale = k_scale if inputs.v_scale is None else inputs.v_scale
    refuse_old_device(k_cache)
    num_written = sum(rows is not None for rows in (inputs.k, inputs.v))
    kv_heads, value_width, rotated = k.shape[1], v.shape[2], 0 if inputs.tables is None else inputs.tables[0].shape[-1]
    kv_format = None if inputs.k_scale is None else format_of(k_cache)
    block_d, block_h = head_blocks(max(heads, kv_heads), width)
    strides = {
        f"{name}_stride_{axis}": stride
        for name, rows in (("k", k_cache), ("v", v_cache), ("ks", k_scale), ("vs", v_scale))
        for axis, stride in zip("bph", rows.stride(), strict=False)
    }
    arguments = strides | {
        "value_factor": how.value_factor,
        "eps": how.eps,
        "q_stride_t": inputs.q.stride(0),
        "k_stride_t": k.stride(0),
        "v_stride_t": v.stride(0),
        "BLOCK_SIZE": k_cache.shape[1],
        "H": heads,
        "KVH": kv_heads,
        "D": width,
        "E": value_width,
        "R": rotated,
        "BEGIN": width - rotated if how.rotates_last else 0,
        "INTERLEAVED": how.interleaved,
        "NORM": how.norm,
        "HAS_Q_WEIGHT": how.q_weight is not None,
        "HAS_K_WEIGHT": how.k_weight is not None,
        "NORM_AFTER": how.norm_after_rotation,
        "LOG_HADAMARD": block_of(width).bit_length() - 1 if how.hadamard else 0,
        "VALUE_NORM": how.value_norm,
        "HAS_QUERY_SCALE": inputs.query_scale is not None,
        "TO_INTEGER": not k_cache.is_floating_point(),
        "LARGEST": 0.0 if kv_format is None else kv_format.largest,
        "PACKED": is_packed(k_cache),
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "BLOCK_E": next_power_of_two(value_width),
    }
    parts = -(-heads // block_h) + num_written * -(-kv_heads // block_h)
    return PreparedLaunch(prepare_and_write, arguments, num_warps=4), parts


def head_blocks(num_heads: int, width: int) -> tuple[int, int]:
    """Return how many elements of a head, and how many heads, one program computes; both are powers of two."""
    block_d = next_power_of_two(width)
    return block_d, min(next_power_of_two(num_heads), max(1, HEAD_ELEMENTS // block_d))
