"""Computes what lies inside a KV cache group's block on one rank: each layer's tensors, their widths, number formats and offsets.

Terms:

    group              layers that keep the same tokens for the same time; a block has the rows of all its layers
    rule               which tokens a group keeps (`groups.Rule`)
    latent row         one row per token that serves as K and V of all heads (MLA, DeepSeek V4)
    compressed entry   a latent row that stands for several tokens; its *indexer* keys tell which entries a query reads
    compressor state   the (kv, gate) rows of recent tokens, from which the next compressed entry is made
    stride             the distance in bytes between the starts of a group's blocks

Example: a layer with 8 KV heads of 64 elements in bfloat16 and blocks of 16 tokens: K takes 16 * 8 * 64 * 2 = 16,384 bytes of a
block, V as much behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from transom_worker.errors import ConfigError
from transom_worker.kvcache.groups import GroupSpec
from transom_worker.kvcache.layout import BLOCK_ALIGNMENT_BYTES, ArenaLayout, GroupLayout, LayerTensors, Role
from transom_worker.model_config.architecture import Architecture
from transom_worker.model_config.layer_attention import LayerAttention
from transom_worker.model_config.sharding import head_share
from transom_worker.planner.groups import Rule, layer_rules, make_groups

FP8 = "float8_e4m3fn"
RAW = "uint8"  # rows that mix number formats
STATE_DTYPE = "float32"  # of compressor states
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1, RAW: 1}
KV_CACHE_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "fp8_ds_mla": FP8,
}
FP8_SCALE_GROUP = 64  # elements of a latent row that share a scale of one byte; a row's scales are padded to 8
INDEXER_SCALE_BYTES = 4  # of an indexer key in FP8


class Tensor(NamedTuple):
    """What one row of a layer's tensor has: its role, KV heads, elements of K and V per head, and number format.

    `v_size` 0: K's tensor serves as V too.
    """

    role: Role
    heads: int
    k_size: int
    v_size: int
    dtype: str


def kv_dtype(kv_cache_dtype: str, model_dtype: str) -> str:
    """Return torch's name of the cache's number format; `auto` is the model's.

    Raises:
        ConfigError: the format is unknown.
    """
    if kv_cache_dtype == "auto":
        return model_dtype
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"--kv-cache-dtype is {kv_cache_dtype!r}; give auto, {', '.join(KV_CACHE_DTYPES)}.")
    return KV_CACHE_DTYPES[kv_cache_dtype]


def cache_groups(
    architecture: Architecture,
    *,
    block_size: int,
    dtype: str,
    tensor_parallel_size: int = 1,
    rank: int = 0,
    hybrid: bool = True,
) -> tuple[GroupLayout, ...]:
    """Return every group's block for a cache in `dtype`: its tensors layer by layer without gaps, K before V.

    KV heads are those of `rank`; the first rank has most in every group. Latent rows and compressed entries are on every rank.
    `hybrid=False` keeps every token in every group.

    Raises:
        ConfigError: the block size does not suit the model's compression.
    """
    groups = make_groups(architecture, block_size=block_size, hybrid=hybrid)
    heads = [
        head_share(architecture, index, rank, tensor_parallel_size).num_kv for index in range(architecture.num_layers)
    ]
    rows = [_layer_tensors(layer, dtype, held) for layer, held in zip(architecture.layers, heads, strict=True)]
    rules = [layer_rules(layer, hybrid=hybrid) for layer in architecture.layers]
    return tuple(_group_layout(spec, rows, rules) for spec in groups)


def rank_layout(layout: ArenaLayout, groups: Sequence[GroupLayout]) -> ArenaLayout:
    """Return the first rank's `layout` for another rank: equal ids, pages and strides, with that rank's `groups` inside the blocks.

    Smaller strides on a rank with smaller blocks would gain nothing: all ranks have the same ids, so the memory of the rank with
    the largest blocks decides how many there are.

    Raises:
        ValueError: a block does not fit, so the layout is not that of the rank with the largest blocks.
    """
    for wide, own in zip(layout.groups, groups, strict=True):
        if own.block_bytes > wide.block_bytes:
            raise ValueError(
                f"Blocks of {own.spec.name} take {own.block_bytes} bytes, more than {wide.block_bytes} there."
            )
    pairs = zip(layout.groups, groups, strict=True)
    return replace(layout, groups=tuple(replace(own, stride_bytes=wide.stride_bytes) for wide, own in pairs))


def _layer_tensors(layer: LayerAttention, dtype: str, heads: int) -> tuple[Tensor, ...]:
    """Return the tensors of a layer that has `heads` KV heads on this rank."""
    size, compression = layer.head_size, layer.compression
    if not layer.latent:
        return (Tensor(Role.KV, heads, size, layer.value_size or size, dtype),)
    width, format_ = _latent_row(layer, dtype)
    latent = Tensor(Role.KV, 1, width, 0, format_)
    if compression is None:
        return (latent,)
    coefficient = 1 + compression.overlap  # the compressor makes one (kv, gate) per entry that a token contributes to
    tensors = [
        latent,
        latent._replace(role=Role.COMPRESSED),
        Tensor(Role.STATE, 1, coefficient * size, coefficient * size, STATE_DTYPE),
    ]
    if index_size := compression.index_size:
        index = (index_size + INDEXER_SCALE_BYTES, RAW) if dtype == FP8 else (index_size, dtype)
        tensors.append(Tensor(Role.INDEXER, 1, index[0], 0, index[1]))
        tensors.append(Tensor(Role.INDEXER_STATE, 1, coefficient * index_size, coefficient * index_size, STATE_DTYPE))
    return tuple(tensors)


def _latent_row(layer: LayerAttention, dtype: str) -> tuple[int, str]:
    """Return the width and the number format of a latent row.

    In FP8 the elements with RoPE stay in 16 bits, and the scales of the others stand behind them. Example, 448 elements without and
    64 with RoPE: 448 + 2 * 64 + 8 (7 scales, padded) = 584 bytes.
    """
    if dtype != FP8:
        return layer.head_size, dtype
    num_plain = layer.head_size - layer.rope_size
    num_scales = -(-num_plain // FP8_SCALE_GROUP)
    return num_plain + 2 * layer.rope_size + -(-num_scales // 8) * 8, RAW


def _group_layout(spec: GroupSpec, tensors: list[tuple[Tensor, ...]], rules: list[dict[Role, Rule]]) -> GroupLayout:
    """Return a group's block: the tensors with the group's rule, one behind the other. `tensors` and `rules` are by layer."""
    rule = Rule(spec.kind, spec.window, spec.sinks, spec.chunk, spec.ratio, spec.overlap)
    group = GroupLayout(spec=spec, block_bytes=0, stride_bytes=0, layers=())
    offset = 0
    layers = []
    for index in spec.layers:
        for tensor in tensors[index]:
            if rules[index][tensor.role] != rule:
                continue
            row_bytes = group.rows_per_block * tensor.heads * DTYPE_BYTES[tensor.dtype]
            k_bytes, v_bytes = row_bytes * tensor.k_size, row_bytes * tensor.v_size
            layers.append(
                LayerTensors(
                    layer=index,
                    role=tensor.role,
                    num_kv_heads=tensor.heads,
                    k_size=tensor.k_size,
                    v_size=tensor.v_size or tensor.k_size,
                    dtype=tensor.dtype,
                    k_offset=offset,
                    v_offset=offset + k_bytes if v_bytes else offset,
                )
            )
            offset += k_bytes + v_bytes
    stride = -(-offset // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES
    return replace(group, block_bytes=offset, stride_bytes=stride, layers=tuple(layers))
