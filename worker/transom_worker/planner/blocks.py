"""Computes the content of a KV cache group's block on one rank: each layer's tensors, their widths, number formats and offsets.

    rule               which tokens a group keeps (`layer_groups.Rule`)
    latent row         one row per token that serves as K and V of all heads (MLA, DeepSeek V4); where an indexer selects the
                       tokens that a query reads (DeepSeek V3.2, GLM-5), its key of the token is stored as V
    compressed entry   a latent row that stands for several tokens; its *indexer* keys tell which entries a query reads
    compressor state   the (kv, gate) rows of recent tokens, from which the next compressed entry is made
    convolution row    a token's gated input of a short convolution; each rank has the channels that it computes
    snapshot           the states of recurrent layers after some number of tokens, and their convolutions' last inputs
    scale              the float32 number by which a quantised key or value of one token and KV head is multiplied

Example: a layer with 8 KV heads of 64 elements in bfloat16 and blocks of 16 tokens: K takes 16 * 8 * 64 * 2 = 16,384 bytes of a
block, and V, which comes after it, as many. In int8 each takes 8,192, and K's and V's scales follow, 16 * 8 * 4 = 512 bytes each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.layout import (
    BLOCK_ALIGNMENT_BYTES,
    DTYPE_BYTES,
    ArenaLayout,
    GroupLayout,
    LayerTensors,
    Role,
)
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.layer_attention import LayerAttention
from transom_core.model_config.sharding import HeadShare, head_share
from transom_core.settings.kv_dtypes import AUTO, QUANTISED
from transom_worker.planner.layer_groups import Rule, group_formats, layer_rules, make_groups

RAW = "uint8"  # the dtype of rows that mix number formats
STATE_DTYPE = "float32"  # of compressor states and recurrent states
# Quantised format -> torch's name of the dtype in which its values are stored (int4 packs two values into a byte).
STORED_DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}
SCALE_BYTES = 4
ALIGNMENT_BYTES = 16  # of each tensor of a quantised layer, and of recurrent states
FP8_SCALE_GROUP = 64  # elements of a latent row that share a scale of one byte; a row's scales are padded to 8 bytes
INDEXER_SCALE_BYTES = 4  # of an indexer key in FP8


class Tensor(NamedTuple):
    """One row of a layer's tensor: its role, number of KV heads, elements of K and V per head, and their dtype.

    If `v_size` is 0, K's tensor serves as V too. If `scaled`, each row and head of K and V has a scale.
    """

    role: Role
    heads: int
    k_size: int
    v_size: int
    dtype: str
    scaled: bool = False


def cache_groups(
    architecture: Architecture,
    *,
    block_size: int,
    dtype: str,
    kv_cache_dtype: str = AUTO,
    tensor_parallel_size: int = 1,
    rank: int = 0,
    hybrid: bool = True,
) -> tuple[GroupLayout, ...]:
    """Return every group's block: its tensors layer by layer, K before V, then their scales; a block has gaps only if quantised
    or a snapshot.

    `dtype` is torch's name of the model's dtype; `kv_cache_dtype` is the setting of that name. The KV heads are those of `rank`;
    rank 0 has at least as many as any other rank. Every rank holds all latent rows and compressed entries. `hybrid=False` keeps
    every token in every group.

    Raises:
        ConfigError: the block size does not suit the model's compression, or a group cannot have its number format.
    """
    groups = make_groups(architecture, block_size=block_size, hybrid=hybrid)
    formats = group_formats(architecture, groups, kv_cache_dtype, dtype)
    heads = [head_share(architecture, index, rank, tensor_parallel_size) for index in range(architecture.num_layers)]
    rules = [layer_rules(layer, hybrid=hybrid) for layer in architecture.layers]
    layouts = []
    for spec, name in zip(groups, formats, strict=True):
        rows = {index: _layer_tensors(architecture.layers[index], name, heads[index]) for index in spec.layers}
        layouts.append(_group_layout(spec, rows, rules))
    return tuple(layouts)


def rank_layout(layout: ArenaLayout, groups: Sequence[GroupLayout]) -> ArenaLayout:
    """Return rank 0's `layout` for another rank: block ids, pages and strides are equal, and the blocks hold that rank's `groups`.

    Smaller strides on a rank with smaller blocks would gain nothing: all ranks have the same block ids, so the rank with the
    largest blocks decides how many blocks there are.

    Raises:
        ValueError: a block does not fit into its stride, so `layout` is not that of the rank with the largest blocks.
    """
    for wide, own in zip(layout.groups, groups, strict=True):
        if own.block_bytes > wide.block_bytes:
            raise ValueError(
                f"Blocks of {own.spec.name} take {own.block_bytes} bytes, more than {wide.block_bytes} there."
            )
    pairs = zip(layout.groups, groups, strict=True)
    return replace(layout, groups=tuple(replace(own, stride_bytes=wide.stride_bytes) for wide, own in pairs))


def _layer_tensors(layer: LayerAttention, name: str, share: HeadShare) -> tuple[Tensor, ...]:
    """Return the tensors of a layer with this rank's heads, in the number format with this name."""
    size, compression, heads = layer.head_size, layer.compression, share.num_kv
    if layer.convolution is not None:
        return (Tensor(Role.KV, heads, size, 0, name),)
    if layer.recurrent is not None:
        values, width = share.num_queries, layer.value_size or size
        state = Tensor(Role.RECURRENT, values, size * width, 0, STATE_DTYPE)
        own = Tensor(Role.CONVOLVED_VALUES, values, width, 0, name)
        keys = Tensor(Role.CONVOLVED_KEYS, heads, size, size, name)
        return (state, *((own,) if layer.step_rank else (keys, own)) * (layer.recurrent - 1))
    if not layer.latent:
        per_element = 2 if name == "int4" else 1
        widths = size // per_element, (layer.value_size or size) // per_element
        return (Tensor(Role.KV, heads, *widths, STORED_DTYPES.get(name, name), scaled=name in QUANTISED),)
    latent = Tensor(Role.KV, 1, *_latent_row(layer, name))
    if compression is None:
        return (latent,)
    # A token has one (kv, gate) row for each compressed entry that it contributes to.
    coefficient = 1 + compression.overlap
    tensors = [
        latent,
        latent._replace(role=Role.COMPRESSED),
        Tensor(Role.STATE, 1, coefficient * size, coefficient * size, STATE_DTYPE),
    ]
    if index_size := compression.index_size:
        tensors.append(Tensor(Role.INDEXER, 1, _index_row(index_size, name), 0, RAW if name == "fp8" else name))
        tensors.append(Tensor(Role.INDEXER_STATE, 1, coefficient * index_size, coefficient * index_size, STATE_DTYPE))
    return tuple(tensors)


def _latent_row(layer: LayerAttention, name: str) -> tuple[int, int, str]:
    """Return (K's width, V's width, dtype) of a latent row. V is the indexer's key, if there is one, since the row serves as both.

    In FP8 the elements with RoPE stay in 16 bits, and the other elements' scales come last. Example, 448 elements without and 64
    with RoPE: 448 + 2 * 64 + 8 (7 scales of a byte, padded to 8) = 584 bytes.
    """
    index = _index_row(layer.index_size, name)
    if name != "fp8":
        return layer.head_size, index, name
    num_plain = layer.head_size - layer.rope_size
    num_scales = -(-num_plain // FP8_SCALE_GROUP)
    return num_plain + 2 * layer.rope_size + -(-num_scales // 8) * 8, index, RAW


def _index_row(size: int, name: str) -> int:
    """Return the width of an indexer's key of `size` numbers. In FP8 its scale follows."""
    return size + INDEXER_SCALE_BYTES * (size > 0 and name == "fp8")


def _group_layout(
    spec: GroupSpec, tensors: Mapping[int, tuple[Tensor, ...]], rules: Sequence[Mapping[Role, Rule]]
) -> GroupLayout:
    """Return a group's block: the tensors with the group's rule, one after the other. Layer numbers index `tensors` and `rules`."""
    rule = Rule(spec.kind, spec.window, spec.sinks, spec.chunk, spec.ratio, spec.overlap)
    group = GroupLayout(spec=spec, block_bytes=0, stride_bytes=0, layers=())
    end = 0
    layers = []
    for index in spec.layers:
        for tensor in tensors[index]:
            if rules[index][tensor.role] == rule:
                part, end = _place(tensor, index, group.rows_per_block, end)
                layers.append(part)
    stride = _aligned(end, BLOCK_ALIGNMENT_BYTES)
    return replace(group, block_bytes=end, stride_bytes=stride, layers=tuple(layers))


def _place(tensor: Tensor, layer: int, rows: int, begin: int) -> tuple[LayerTensors, int]:
    """Return where a tensor's K, V and scales lie if byte `begin` of the block is the first free one, and where they end."""
    alignment = ALIGNMENT_BYTES if tensor.scaled or tensor.role is Role.RECURRENT else 1
    row_bytes = rows * tensor.heads * DTYPE_BYTES[tensor.dtype]
    scale_bytes = rows * tensor.heads * SCALE_BYTES
    sizes = [row_bytes * tensor.k_size, row_bytes * tensor.v_size, *([scale_bytes] * 2 if tensor.scaled else [])]
    offsets = []
    for size in sizes:
        offsets.append(_aligned(begin, alignment))
        begin = offsets[-1] + size
    part = LayerTensors(
        layer=layer,
        role=tensor.role,
        num_kv_heads=tensor.heads,
        k_size=tensor.k_size,
        v_size=tensor.v_size or tensor.k_size,
        dtype=tensor.dtype,
        k_offset=offsets[0],
        v_offset=offsets[1] if tensor.v_size else offsets[0],
        k_scale_offset=offsets[2] if tensor.scaled else None,
        v_scale_offset=offsets[3] if tensor.scaled else None,
    )
    return part, begin


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
