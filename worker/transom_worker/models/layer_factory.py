"""Makes the attention (or what stands in its place) and the norms of one layer from a checkpoint, as the family's `Style` says.

Legend: H query heads and KV heads, D head width.
"""

from dataclasses import replace
from functools import partial

import torch

from transom_core.model_config.architecture import Architecture, LayerAttention
from transom_core.model_config.recurrent import KDA_FAMILIES, LING, OLMO_HYBRID
from transom_core.model_config.rope import Rope
from transom_core.model_config.sharding import HeadShare, head_share, kv_holders
from transom_kernels.kv_write import Preparation
from transom_worker.models.layers.attention import Attention, TokenMixer
from transom_worker.models.layers.linear import Linear
from transom_worker.models.layers.norm import (
    AllHeadsQkNorm,
    LayerNorm,
    Norm,
    RmsNorm,
    ShardedAllHeadsQkNorm,
    SharedGroups,
)
from transom_worker.models.layers.recurrent_layer import RecurrentLayer, RecurrentWeights
from transom_worker.models.layers.rotary_embedding import RotaryEmbedding, frequencies
from transom_worker.models.layers.short_convolution import ShortConvolution
from transom_worker.models.loading import Loader
from transom_worker.models.mamba1 import Mamba1Layer
from transom_worker.models.mla import MlaAttention
from transom_worker.models.style import Style


def make_token_mixer(architecture: Architecture, index: int, style: Style, load: Loader) -> TokenMixer:
    """Make the attention of layer `index`, or what stands in its place; `load` reads names within the layer."""
    if architecture.layers[index].step_rank:
        return Mamba1Layer(architecture, index, load.under("mamba."))
    if architecture.layers[index].recurrent is not None:
        return _recurrent(architecture, index, load.under("linear_attn." if architecture.mamba is None else "mamba."))
    if architecture.layers[index].convolution is not None:
        return _short_convolution(architecture, index, load.under("conv."))
    load = load.under("self_attn.")
    if architecture.mla is not None:
        return MlaAttention(architecture, architecture.mla, index, load)
    return make_attention(architecture, index, style, load)


def _short_convolution(architecture: Architecture, index: int, load: Loader) -> ShortConvolution:
    """Make the short convolution of layer `index` with this rank's channels."""
    layer, hidden, bias = architecture.layers[index], architecture.hidden_size, architecture.convolution_bias
    assert layer.convolution is not None
    own = _rows(head_share(architecture, index, load.parallel.rank, load.parallel.size).kv, layer.head_size)
    # One tensor has the three projections, one after the other.
    thirds = [slice(first + own.start, first + own.stop) for first in (0, hidden, 2 * hidden)]
    projection = load.linear(*["in_proj"] * 3, shapes=[(3 * hidden, hidden)] * 3, rows=thirds, bias=bias)
    weight_C1L = load.tensor("conv.weight", shape=(hidden, 1, layer.convolution), part=(own,))
    return ShortConvolution(
        projection,
        load.row_parallel("out_proj", shape=(hidden, hidden), columns=own, bias=bias),
        weight_C1L[:, 0].T.contiguous(),
        load.tensor("conv.bias", shape=(hidden,), part=(own,)) if bias else None,
    )


def _recurrent(architecture: Architecture, index: int, load: Loader) -> RecurrentLayer:
    """Make the recurrent layer `index` with this rank's heads."""
    layer, hidden, mamba = architecture.layers[index], architecture.hidden_size, architecture.mamba
    is_kda, is_ling = architecture.family in KDA_FAMILIES, architecture.family == LING
    assert layer.recurrent is not None
    assert layer.value_size is not None
    heads = head_share(architecture, index, load.parallel.rank, load.parallel.size)
    keys, values = layer.num_kv_heads * layer.head_size, layer.num_heads * layer.value_size
    own_keys, own_values = _rows(heads.kv, layer.head_size), _rows(heads.queries, layer.value_size)
    # Names of the parts of the input's projection, the rows of each in the whole model, and this rank's.
    parts = [("q", keys, own_keys), ("k", keys, own_keys), ("v", values, own_values), ("z", values, own_values)]
    parts += [(name, layer.num_heads, heads.queries) for name in ("ba" if mamba is None else "a")]
    twice = None
    if is_ling:
        parts = [(name, values, own_values) if name == "a" else (name, rows, own) for name, rows, own in parts]
    elif is_kda:  # gates and steps by way of a narrow row, which every rank has whole
        narrow = layer.value_size
        whole = narrow, slice(0, narrow)
        parts = [(name, *(whole if name in "za" else (rows, own))) for name, rows, own in parts]
        second = partial(load.linear, shapes=[(values, narrow)], rows=[own_values])
        twice = second("g_b_proj"), second("f_b_proj")
    has_bias = mamba is not None and mamba.projection_bias
    projection = load.linear(
        *(f"in_proj_{name}" for name, _, _ in parts),
        shapes=[(rows, hidden) for _, rows, _ in parts],
        rows=[own for _, _, own in parts],
        bias=has_bias,
    )
    # Where the channels of queries, keys and values begin in the checkpoint's tensors: Mamba-2 has them the other way round.
    firsts = (0, keys, 2 * keys) if mamba is None else (values + keys, values, 0)
    own_channels = [_shifted(own, first) for own, first in zip((own_keys, own_keys, own_values), firsts, strict=True)]
    channels = 2 * keys + values

    def convolution(name: str, *rest: int) -> torch.Tensor:
        if is_kda or architecture.family == OLMO_HYBRID:  # a tensor each
            tensors = (load.tensor(f"{part}_{name}", shape=(rows, *rest), part=(own,)) for part, rows, own in parts[:3])
            return torch.cat(list(tensors))
        return torch.cat([load.tensor(name, shape=(channels, *rest), part=(own,)) for own in own_channels])

    def by_head(name: str, shape: tuple[int, ...] = (layer.num_heads,), part: slice = heads.queries) -> torch.Tensor:
        return load.tensor(name, torch.float32, shape=shape, part=(*[slice(None)] * (len(shape) // 2), part)).flatten()

    own_norm = (layer.value_size, slice(None)) if mamba is None else (values, own_values)
    has_norm, shared = mamba is None or mamba.has_norm, None
    if mamba is not None and load.parallel.size > layer.num_kv_heads:
        width = values // layer.num_kv_heads
        shared = SharedGroups(own=heads.kv, count=layer.num_kv_heads, width=width, comm=load.parallel.comm)
    output_bias = mamba is not None and mamba.output_bias
    return RecurrentLayer(
        projection,
        load.row_parallel("out_proj", shape=(hidden, values), columns=own_values, bias=output_bias),
        replace(layer, num_heads=heads.num_queries, num_kv_heads=heads.num_kv),
        RecurrentWeights(
            convolution_LC=convolution("conv1d.weight", 1, layer.recurrent)[:, 0].T.contiguous(),
            bias_C=convolution("conv1d.bias") if mamba is not None and mamba.convolution_bias else None,
            step_bias_H=by_head("dt_bias", (values,), own_values) if is_kda else by_head("dt_bias"),
            rate_H=by_head("A_log", (1, 1, layer.num_heads, 1) if is_kda and not is_ling else (layer.num_heads,)).exp(),
            skip_H=None if mamba is None else by_head("D"),
            norm=load.tensor("norm.weight", torch.float32, shape=own_norm[:1], part=own_norm[1:]) if has_norm else None,
            gates_first=mamba is not None and not mamba.norm_first,
            eps=_eps_of_gated_norm(architecture),
            most_strength=architecture.most_strength,
            most_decay=architecture.most_decay,
            by_sigmoid=is_kda,
            twice=twice,
            shared=shared,
        ),
    )


def _eps_of_gated_norm(architecture: Architecture) -> float:
    if architecture.family == OLMO_HYBRID:
        return 1e-5  # whatever the config says of the other norms
    return architecture.rms_norm_eps if architecture.mamba is None else architecture.mamba.norm_eps


def _shifted(rows: slice, first: int) -> slice:
    """Return the same rows in a tensor in which other rows come first."""
    return slice(first + rows.start, first + rows.stop)


def make_attention(architecture: Architecture, index: int, style: Style, load: Loader) -> Attention:
    """Make the attention of layer `index` with this rank's heads; `load` reads names within `self_attn`."""
    layer, rope = architecture.layers[index], architecture.ropes[index]
    heads = head_share(architecture, index, load.parallel.rank, load.parallel.size)
    qkv = _projections(architecture, index, heads, style, load)
    value_size = layer.value_size or layer.head_size
    widths = (architecture.hidden_size, layer.num_heads * value_size)
    columns = _rows(heads.queries, value_size)
    output = load.row_parallel("o_proj", shape=widths, columns=columns, bias=architecture.output_bias)
    scale, has_head_norms = architecture.scales.query, style.qk_norm == "each" and architecture.has_qk_norm
    q_weight, k_weight = _head_norms(layer, heads, style, load) if has_head_norms else (None, None)
    preparation = Preparation(
        norm=q_weight is not None,
        q_weight=q_weight,
        k_weight=k_weight,
        norm_after_rotation=rope is not None and architecture.norm_after_rotation,
        value_norm=style.value_norm,
        value_factor=architecture.scales.value,
        eps=architecture.rms_norm_eps,
        interleaved=rope is not None and rope.stays_interleaved,
    )
    norm = _norm_over_all_heads(architecture, layer, heads, load) if style.qk_norm == "all" else None
    own = replace(layer, num_heads=heads.num_queries, num_kv_heads=heads.num_kv)
    return Attention(
        qkv,
        output,
        own,
        preparation,
        norm,
        scale=float(layer.head_size**-0.5 if scale is None else scale),
        soft_cap=architecture.scales.attention_cap,
        sink_logits=_sinks(layer, heads, style, load) if index in architecture.sink_layers else None,
        gates_of_head=_gates_of_head(layer, style),
        most_kv_heads=head_share(architecture, index, 0, load.parallel.size).num_kv,  # the first ranks have most
    )


def _projections(architecture: Architecture, index: int, heads: HeadShare, style: Style, load: Loader) -> Linear:
    """Load the fused projection of queries, keys and values, and of the output's gate if the family has one; of queries alone if
    the layer reads another layer's cache."""
    layer, rope, bias = architecture.layers[index], architecture.ropes[index], architecture.attention_bias
    queries, keys = ((n * layer.head_size, architecture.hidden_size) for n in (layer.num_heads, layer.num_kv_heads))
    own_queries, own_keys = (_rows(own, layer.head_size) for own in (heads.queries, heads.kv))
    if layer.reads_cache_of is not None:
        return load.linear("q_proj", bias=bias, shapes=[queries], rows=[own_queries])
    moves_pairs = rope is not None and rope.interleaved and not rope.stays_interleaved
    pairs = (heads.num_queries, heads.num_kv, None) if moves_pairs else ()
    keys_are_values = architecture.keys_are_values and layer.window is None
    names: tuple[str, ...] = ("q_proj", "k_proj", "k_proj" if keys_are_values else "v_proj")
    value_size = layer.value_size or layer.head_size
    values = (layer.num_kv_heads * value_size, architecture.hidden_size)
    shapes = [queries, keys, values]
    own = [own_queries, own_keys, _rows(heads.kv, value_size)]
    if gates := _gates_of_head(layer, style):
        names, shapes = (*names, style.output_gate), [*shapes, (layer.num_heads * gates, architecture.hidden_size)]
        own = [*own, _rows(heads.queries, gates)]
    return load.linear(*names, bias=bias, pairs_of=pairs, shapes=shapes, rows=own)


def _gates_of_head(layer: LayerAttention, style: Style) -> int:
    """Return how many gates the output of one head has; 0: the family has none."""
    if not style.output_gate:
        return 0
    return 1 if style.gates_heads else layer.value_size or layer.head_size


def _rows(heads: slice, size: int) -> slice:
    """Return the rows of a projection's weight that belong to these heads of `size` elements."""
    return slice(heads.start * size, heads.stop * size)


def _sinks(layer: LayerAttention, heads: HeadShare, style: Style, load: Loader) -> torch.Tensor:
    """Load the learned sink logit of each of this rank's heads, float32 [H]."""
    return load.tensor(style.sink_logits, torch.float32, shape=(layer.num_heads,), part=(heads.queries,))


def make_norm(name: str, architecture: Architecture, style: Style, load: Loader) -> Norm:
    """Load a norm over rows: LayerNorm or RMS norm, as the style says."""
    if style.norm_takes_mean:
        return LayerNorm(load.tensor(f"{name}.weight", shape=(architecture.hidden_size,)), architecture.rms_norm_eps)
    return make_rms_norm(name, architecture, style, load)


def make_rms_norm(name: str, architecture: Architecture, style: Style, load: Loader) -> RmsNorm:
    """Load an RMS norm over rows."""
    size, eps = architecture.hidden_size, architecture.rms_norm_eps
    return load.norm(name, eps, size=size, plus_one=style.norm_plus_one, wide=style.norm_wide)


def _head_norms(
    layer: LayerAttention, heads: HeadShare, style: Style, load: Loader
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the QK norm's weights of this rank's query heads [H, D] and key heads [H, D]. There are no key heads, [0, D], if the
    layer reads another layer's cache."""
    dtype = torch.float32 if style.norm_plus_one or style.norm_wide else load.dtype
    # A layer that reads another layer's cache has no `k_norm`; then `num_keys` is 0, and `key` has any values.
    names = ("q_norm", "k_norm") if layer.reads_cache_of is None else ("q_norm", "q_norm")
    query, key = (load.tensor(f"{name}.weight", dtype, shape=(layer.head_size,)) for name in names)
    num_keys = heads.num_kv if layer.reads_cache_of is None else 0
    weight_HD = torch.cat([query.expand(heads.num_queries, -1), key.expand(num_keys, -1)])
    if style.norm_plus_one:
        weight_HD += 1.0
    return weight_HD[: heads.num_queries], weight_HD[heads.num_queries :]


def _norm_over_all_heads(
    architecture: Architecture, layer: LayerAttention, heads: HeadShare, load: Loader
) -> AllHeadsQkNorm | ShardedAllHeadsQkNorm:
    """Load a QK norm whose root mean square is taken over all heads of all ranks (Olmo 3)."""
    size, eps, parallel = layer.head_size, architecture.rms_norm_eps, load.parallel
    widths = (layer.num_heads * size, layer.num_kv_heads * size)
    query, key = (
        load.tensor(f"{name}_norm.weight", torch.float32, shape=(width,), part=(_rows(own, size),))
        for name, width, own in zip("qk", widths, (heads.queries, heads.kv), strict=True)
    )
    if parallel.size == 1:
        return AllHeadsQkNorm(query, key, eps)
    # Several ranks may hold the same KV head: only the first of them adds its keys to the sum of squares.
    counts_keys = kv_holders(layer.num_kv_heads, heads.kv.start, parallel.size).start == parallel.rank
    return ShardedAllHeadsQkNorm(query, key, eps, widths=widths, counts_keys=counts_keys, comm=parallel.comm)


def make_rotary(rope: Rope, load: Loader, *, interleaved: bool) -> RotaryEmbedding:
    """Make the rotary embedding of a RoPE; `interleaved` pairs lie as the checkpoint has them (`Rope.stays_interleaved`)."""
    factor = rope.attention_factor
    return RotaryEmbedding(frequencies(rope, load.device), dtype=load.dtype, scale=factor, interleaved=interleaved)
