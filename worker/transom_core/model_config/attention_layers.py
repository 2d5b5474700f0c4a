"""Reads the attention of every layer from a `config.json` of any family that can be planned. This module imports no torch.

A *family* is the config's `model_type`. If a config does not list its `layer_types`, its family's rule gives them. Example: Gemma
2's configs have no list; its rule is a sliding window in layers 0, 2, 4 ... and full attention in the others. Most sizes are equal
in all layers; single layers may have their own, such as in `per_layer_config`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transom_core.errors import ModelError
from transom_core.model_config import jamba, lfm2, mamba, recurrent, step3p5
from transom_core.model_config.layer_attention import Compression, LayerAttention
from transom_core.model_config.mla import INDEXED_FAMILIES, MLA_FAMILIES, index_sizes

Config = Mapping[str, Any]

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
COMPRESSED_SPARSE = "compressed_sparse_attention"
COMPRESSED_HEAVILY = "heavily_compressed_attention"
_MAX_LAYERS = 4096
_LONGEST_REACH = (1 << 31) - 1  # tokens; kernels compare positions as 32-bit integers
_DEFAULT_RATES = {COMPRESSED_SPARSE: 4, COMPRESSED_HEAVILY: 128}


def attention_layers(config: Config) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer, the lowest layer first.

    Raises:
        ModelError: the family or a layer type is unknown.
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    family = str(config.get("model_type", ""))
    if family not in LAYER_TYPES:
        raise ModelError(f"config.json says model_type {family!r}; known are {', '.join(sorted(LAYER_TYPES))}.")
    num_layers = int(config["num_hidden_layers"])
    if not 0 < num_layers <= _MAX_LAYERS:
        raise ModelError(f"config.json says num_hidden_layers {str(num_layers)[:20]}; 1 to {_MAX_LAYERS} are possible.")
    types = config.get("layer_types") or [LAYER_TYPES[family](config, index) for index in range(num_layers)]
    if len(types) != num_layers:
        raise ModelError(f"config.json lists {len(types)} layer_types for num_hidden_layers {num_layers}.")
    own = _own_sizes(config, types)
    plain = _plain_layer(config, family)
    layers = [_of_type(kind, _with_own_sizes(plain, own.get(index, {})), config) for index, kind in enumerate(types)]
    _check_sizes(layers)
    return _sharing(layers, types, int(config.get("num_kv_shared_layers") or 0))


def _check_sizes(layers: Sequence[LayerAttention]) -> None:
    """Raise ModelError unless every layer has heads, a head size and a window from 1 to _LONGEST_REACH."""
    for index, layer in enumerate(layers):
        reaches = (layer.recurrent, layer.convolution, layer.chunk, layer.window)
        reach = next((size for size in reaches if size is not None), None)
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.value_size)
        if min(1 if size is None else size for size in (*sizes, reach)) < 1:
            raise ModelError(
                f"config.json gives layer {index} {layer.num_heads} heads and {layer.num_kv_heads} KV heads of "
                f"{layer.head_size}, which see {'all' if reach is None else reach} tokens; all must be at least 1."
            )
        if reach is not None and reach > _LONGEST_REACH:
            raise ModelError(
                f"config.json gives layer {index} a window of {str(reach)[:20]} tokens; {_LONGEST_REACH} are possible."
            )
        if layer.num_heads % layer.num_kv_heads:
            raise ModelError(
                f"config.json gives layer {index} {layer.num_kv_heads} KV heads for {layer.num_heads} heads; they must divide them."
            )


def _sharing(layers: list[LayerAttention], types: Sequence[str], num_shared: int) -> tuple[LayerAttention, ...]:
    """Return the layers. Each of the last `num_shared` reads the KV cache of the last layer of its type before those."""
    first = len(layers) - num_shared
    last_of_type = {kind: index for index, kind in enumerate(types[: max(0, first)])}
    if missing := set(types[max(0, first) :]) - set(last_of_type):
        raise ModelError(
            f"config.json says num_kv_shared_layers {num_shared}, but no layer before these is of type {min(missing)!r}."
        )
    shared = (replace(layers[index], reads_cache_of=last_of_type[types[index]]) for index in range(first, len(layers)))
    return (*layers[:first], *shared)


def _own_sizes(config: Config, types: Sequence[str]) -> dict[int, Config]:
    """Return layer index -> sizes that differ from the config's. Gemma 4's configs give them for all full layers together."""
    if indexed := index_sizes(config):
        return indexed
    if "per_layer_config" in config:
        return {int(index): sizes for index, sizes in config["per_layer_config"].items()}
    if config.get("model_type") == "mimo_v2_flash":
        doubled = {"num_key_value_heads": 2 * int(config["num_key_value_heads"])}
        return {index: doubled for index, kind in enumerate(types) if kind == SLIDING}
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    sizes = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": heads}
    return {index: sizes for index, kind in enumerate(types) if kind == FULL}


def _plain_layer(config: Config, family: str) -> LayerAttention:
    """Return a layer with the config's sizes and full attention."""
    heads = int(config["num_attention_heads"])
    if family in _LATENT_FAMILIES:
        rope = int(config["qk_rope_head_dim"])
        width = int(config["head_dim" if family == "deepseek_v4" else "kv_lora_rank"])
        if family != "deepseek_v4":  # DeepSeek V4's head size includes the elements with RoPE
            width += rope
        return LayerAttention(num_heads=heads, num_kv_heads=1, head_size=width, latent=True, rope_size=rope)
    return LayerAttention(
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        value_size=int(config["v_head_dim"]) if family == "mimo_v2_flash" else None,
    )


def _with_own_sizes(layer: LayerAttention, sizes: Config) -> LayerAttention:
    """Return the layer with heads, head size and the size of index keys from `sizes`, as far as these are given."""
    return replace(
        layer,
        num_heads=int(sizes.get("num_attention_heads") or layer.num_heads),
        num_kv_heads=int(sizes.get("num_key_value_heads") or layer.num_kv_heads),
        head_size=int(sizes.get("head_dim") or layer.head_size),
        index_size=int(sizes.get("index_head_dim") or 0),
    )


def _of_type(kind: str, layer: LayerAttention, config: Config) -> LayerAttention:
    """Return the layer with the window, chunk or compression of its type."""
    match kind:
        case "full_attention":
            return layer
        # transformers' names, the second one before 5.23
        case "indexed_attention" | "deepseek_sparse_attention" if config.get("model_type") in INDEXED_FAMILIES:
            return layer
        case lfm2.CONVOLUTION if config.get("model_type") in lfm2.LFM2_FAMILIES:
            return lfm2.convolution_layer(config)
        case recurrent.LINEAR if config.get("model_type") in recurrent.WITH_DELTA_NETS:
            return recurrent.delta_net_layer(config)
        case recurrent.LINEAR if config.get("model_type") in mamba.MAMBA_FAMILIES:
            return mamba.mamba_layer(config)
        case recurrent.LINEAR if config.get("model_type") == jamba.JAMBA:
            return jamba.mamba1_layer(config)
        case "sliding_attention":
            return replace(layer, window=_window(config))
        case "chunked_attention":
            return replace(layer, chunk=int(config["attention_chunk_size"]))
        case "compressed_sparse_attention" | "heavily_compressed_attention":
            return replace(layer, window=int(config["sliding_window"]), compression=_compression(kind, config))
    raise ModelError(f"config.json has the layer type {kind!r}, which is not known.")


def _window(config: Config) -> int:
    """Return the number of tokens that a query reads, itself included. MiMo's published configs do not count the query."""
    before = config.get("sliding_window_size") if config.get("model_type") == "mimo_v2_flash" else None
    return int(config["sliding_window"]) if before is None else int(before) + 1


def _compression(kind: str, config: Config) -> Compression:
    """Return the compression of a layer type.

    A sparse entry also covers the tokens of the entry before it, and an indexer selects the entries that a query reads. Heavily
    compressed entries do not overlap, and queries read all of them.
    """
    ratio = int((_DEFAULT_RATES | (config.get("compress_rates") or {}))[kind])
    if kind == COMPRESSED_HEAVILY:
        return Compression(ratio=ratio)
    return Compression(ratio=ratio, overlap=1, index_size=int(config["index_head_dim"]))


# The families' rules: the layer type of the layer with this index.


def _sliding_from_max_window_layers(config: Config, index: int) -> str:
    uses = config.get("use_sliding_window") and config.get("sliding_window")
    return SLIDING if uses and index >= int(config.get("max_window_layers", 28)) else FULL


def _full_every_nth(default: int) -> Callable[[Config, int], str]:
    """Return the rule that every n-th layer is full; n is the config's sliding_window_pattern, or `default` if it has none."""

    def rule(config: Config, index: int) -> str:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or default
        return SLIDING if (index + 1) % int(pattern) else FULL

    return rule


def _full_every_fourth_from_first(_: Config, index: int) -> str:
    return SLIDING if index % 4 else FULL


def _full_every_fourth_if_sliding(config: Config, index: int) -> str:
    """Return what `_full_every_nth` returns, for configs with a window. A pattern may be letters, L for a window: "LLLG"."""
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        return FULL
    if isinstance(pattern, str):
        return SLIDING if pattern[index % len(pattern)] == "L" else FULL
    return _full_every_nth(4)(config, index)


def _full_every_sixth_and_last(config: Config, index: int) -> str:
    return FULL if index == int(config["num_hidden_layers"]) - 1 else _full_every_nth(6)(config, index)


def _chunked_where_rotary(config: Config, index: int) -> str:
    rotary = config.get("no_rope_layers")
    interval = int(config.get("no_rope_layer_interval", 4))
    return CHUNKED if (rotary[index] if rotary else (index + 1) % interval) else FULL


def _sliding_where_not_rotary(config: Config, index: int) -> str:
    uses = config.get("use_sliding_window") and config.get("sliding_window")
    return SLIDING if uses and _chunked_where_rotary(config, index) == FULL else FULL


def _by_ratio(config: Config, index: int) -> str:
    """Return the layer type from DeepSeek's own `compress_ratios`: tokens per entry, or 0 for a window without entries."""
    return {0: SLIDING, 4: COMPRESSED_SPARSE, 128: COMPRESSED_HEAVILY}[int(config["compress_ratios"][index])]


_LATENT_FAMILIES = (*MLA_FAMILIES, "deepseek_v4")
_FULL_FAMILIES = (
    *("llama", "arcee", "gemma", "glm", "glm4", "granite", "seed_oss", "olmo2", "ernie4_5"),
    *("glm4_moe", "minimax_m2", "solar_open", "olmoe", "mellum", "hy_v3", "ernie4_5_moe"),
    *("granitemoe", "granitemoeshared"),
)
LAYER_TYPES: dict[str, Callable[[Config, int], str]] = {
    **dict.fromkeys(_FULL_FAMILIES, lambda _, index: FULL),
    **dict.fromkeys(MLA_FAMILIES, lambda _, index: FULL),
    **dict.fromkeys(
        ("mistral", "ministral", "ministral3", "phi3", "mixtral"),
        lambda config, index: SLIDING if config.get("sliding_window") else FULL,
    ),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3"), _sliding_from_max_window_layers),
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss"), lambda _, index: FULL if index % 2 else SLIDING),
    **dict.fromkeys(("olmo3", "cohere2"), _full_every_nth(4)),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), _full_every_fourth_from_first),
    **dict.fromkeys(("exaone4", "exaone_moe"), _full_every_fourth_if_sliding),
    **dict.fromkeys(recurrent.WITH_DELTA_NETS, recurrent.layer_type),
    **dict.fromkeys((*mamba.MAMBA_FAMILIES, jamba.JAMBA), lambda _, index: recurrent.LINEAR),
    **dict.fromkeys(lfm2.LFM2_FAMILIES, lfm2.layer_type),
    step3p5.STEP: lambda _, index: FULL,
    "smollm3": _sliding_where_not_rotary,
    "dots1": lambda config, index: (
        SLIDING if config.get("sliding_window") and index >= int(config.get("max_window_layers", 62)) else FULL
    ),
    "qwen3_moe": lambda config, index: (
        SLIDING if config.get("use_sliding_window") and config.get("sliding_window") else FULL
    ),
    "gemma3_text": _full_every_nth(6),
    "gemma4_text": _full_every_sixth_and_last,
    "flint": lambda config, index: (
        FULL if index < 2 or index % 4 == 1 or index == int(config["num_hidden_layers"]) - 1 else SLIDING
    ),
    "afmoe": lambda config, index: (
        SLIDING if (index + 1) % int(config.get("global_attn_every_n_layers") or 4) else FULL
    ),
    "llama4_text": _chunked_where_rotary,
    "mimo_v2_flash": lambda _, index: SLIDING if index and (index + 1) % 6 else FULL,
    "deepseek_v4": _by_ratio,
}
