"""Reads a model's architecture from its `config.json` (or from GGUF metadata under equal names). This module imports no torch.

This module alone decides which tokens each layer's queries read: as the config says, or as the options `--window`, `--sinks`,
`--chunk` and `--window-pattern` say. KV cache groups, the planner's bytes and attention masks all derive from `LayerAttention`. A
*family* is the config's `model_type`, such as "qwen3".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transom_core.errors import ConfigError, ModelError
from transom_core.model_config import falcon_h1, jamba, lfm2, mamba, recurrent, step3p5
from transom_core.model_config.attention_layers import attention_layers
from transom_core.model_config.config_defaults import with_defaults
from transom_core.model_config.deepseek_v4 import DeepseekV4Shape, read_deepseek_v4
from transom_core.model_config.layer_attention import LayerAttention
from transom_core.model_config.mamba import Mamba, read_mamba
from transom_core.model_config.mixture import Mixture, read_mixture
from transom_core.model_config.mla import Mla, read_mla
from transom_core.model_config.rope import ROPE_KINDS, Rope, read_ropes
from transom_core.model_config.scales import NO_SCALES, Scales, read_scales, residual_factor

__all__ = [
    "Architecture",
    "LayerAttention",
    "choose_max_model_len",
    "kv_policy_obstacle",
    "read_architecture",
    "runnable",
    "with_max_model_len",
    "with_windows",
]

# Families of multimodal models -> what their text decoders' configs say in the words of a family of texts. Older configs of Qwen
# have no part for the decoder.
_QWEN2 = {"model_type": "qwen2"}
_TEXT_FAMILIES: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2),
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "exaone4_5_text": {"model_type": "exaone4"},
    "step3p7": {"model_type": "step3p5"},
}

_Activation = Literal["silu", "gelu_tanh", "relu2"]
_ACTIVATIONS: dict[str, _Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNGATED_ACTIVATIONS: dict[str, _Activation] = {"relu2": "relu2"}
_UNGATED_FAMILIES = ("nemotron_h", "arcee")  # whose feed-forward networks have no gates
_LARGEST_SIZE = 1 << 24  # limit of a width or a vocabulary; `_LARGEST` has the limits of other fields
_LARGEST = {"max_position_embeddings": 1 << 28, "head_dim": 1 << 16, "num_attention_heads": 1 << 16}
_BIASED_INPUTS = ("qwen2", "qwen2_moe")  # bias in query, key and value projections only; their configs do not say so
_UNSUPPORTED_BIASES = {"use_bias": ("ernie4_5", "ernie4_5_moe"), "attention_bias": ("afmoe", "lfm3", "step3p5")}
_UNBIASED_OUTPUTS = (*_BIASED_INPUTS, "glm", "glm4", "glm4_moe", "solar_open", "mimo_v2_flash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a decoder and the properties of its layers."""

    family: str  # config.json's model_type
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    checkpoint_dtype: str  # torch's name of the number format
    layers: tuple[LayerAttention, ...]
    output_bias: bool = False  # bias of attention's output projection
    convolution_bias: bool = False  # biases of short convolutions and of their projections; of Mamba-1's convolutions
    activation: str = "silu"  # config.json's name of the activation
    ropes: tuple[Rope | None, ...] = ()  # by layer; None: a NoPE layer
    scales: Scales = NO_SCALES
    mixture: Mixture | None = None
    sink_layers: frozenset[int] = frozenset()  # layers with a learned sink logit per head
    num_feed_forwards: tuple[int, ...] = ()  # feed-forward networks of each layer; (): each has one
    beside: frozenset[int] = frozenset()  # layers that read the rows that the layer before read (Falcon-H1)
    readers_are_wide: bool = False  # layers that read another layer's cache have MLPs twice as wide
    has_qk_norm: bool = True  # False: the config turns the family's norm of each query and key head off
    norm_after_rotation: bool = False  # RMS norm of each query and key head after RoPE
    keys_are_values: bool = False  # in layers without a window the values are the keys before their norm
    layer_embedding_size: int = 0  # width of Gemma 4's per-layer embeddings; 0: none
    layer_vocab_size: int = 0  # vocabulary size of the per-layer embeddings
    deepseek_v4: DeepseekV4Shape | None = None  # sizes that only this family has
    mla: Mla | None = None  # sizes of multi-head latent attention, which all attention layers or none have
    most_strength: float = 1.0  # of the delta rule of recurrent layers
    most_decay: float = 0.0  # the bound of -log of their decays; 0: there is none
    mamba: Mamba | None = None  # what the recurrent layers have if they are Mamba-2's
    num_labels: int = 0  # of the head that a classifier has instead of one for tokens; 0: it writes text

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers)

    @property
    def has_gates(self) -> bool:
        """Return whether feed-forward networks have gates."""
        return self.family not in _UNGATED_FAMILIES

    @property
    def gate_activation(self) -> _Activation:
        """Return the activation of MLPs, as the layers name it."""
        return (_ACTIVATIONS | _UNGATED_ACTIVATIONS)[self.activation]

    def num_feed_forwards_of(self, index: int) -> int:
        """Return the number of feed-forward networks of layer `index`."""
        return self.num_feed_forwards[index] if self.num_feed_forwards else 1

    @property
    def served_dtype(self) -> str:
        """Return the number format of `--dtype auto`: float32 for a float32 checkpoint, otherwise bfloat16."""
        return "float32" if self.checkpoint_dtype == "float32" else "bfloat16"


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a `config.json` describes; for a multimodal model, that of its text decoder.

    Raises:
        ModelError: the family is unknown, or a value is missing or wrong. The message names it.
    """
    config = with_defaults(_text_decoder(config))
    family = str(config.get("model_type", ""))
    if config.get("use_bidirectional_attention") in (True, "all"):
        raise ModelError(
            "config.json says use_bidirectional_attention: its tokens see later ones, so it writes no text."
        )
    for name, families in _UNSUPPORTED_BIASES.items():
        if family in families and config.get(name):
            raise ModelError(
                f"config.json says {name}, which is not supported of {family}: published models have no biases."
            )
    try:
        config = recurrent.with_common_names(mamba.with_common_names(lfm2.with_common_names(config)))
        config = step3p5.with_common_names(jamba.with_common_names(config))
        num_labels = _num_labels(config)
        layers = attention_layers(config)
        ropes = read_ropes(config, layers)
        attention_bias = bool(config.get("attention_bias", family == "gpt_oss"))
        eps_name = (
            "layer_norm_eps" if config.get("rms_norm_eps") is None and "layer_norm_eps" in config else "rms_norm_eps"
        )
        if config.get(eps_name) is None:
            raise KeyError(eps_name)
        architecture = Architecture(
            family=family,
            layers=layers,
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config[eps_name]) / residual_factor(config) ** 2,
            ropes=ropes,
            scales=read_scales(config),
            mixture=read_mixture(config, len(layers)),
            sink_layers=_sink_layers(family, layers),
            num_feed_forwards=tuple(config.get("feed_forwards") or ()),
            beside=falcon_h1.layers_beside(config),
            readers_are_wide=bool(config.get("use_double_wide_mlp", False)),
            has_qk_norm=family != "glm4_moe" or bool(config.get("use_qk_norm", False)),
            norm_after_rotation=family == "llama4_text" and bool(config.get("use_qk_norm", True)),
            keys_are_values=bool(config.get("attention_k_eq_v", False)),
            layer_embedding_size=int(config.get("hidden_size_per_layer_input") or 0),
            layer_vocab_size=int(config.get("vocab_size_per_layer_input") or 0),
            deepseek_v4=read_deepseek_v4(config) if family == "deepseek_v4" else None,
            mla=read_mla(config, ropes[0]),
            most_strength=2.0 if config.get("linear_allow_neg_eigval") else 1.0,
            most_decay=recurrent.most_decay(config),
            mamba=read_mamba(config),
            activation=_activation(config),
            # A classifier's files have no head for tokens; the token that each request ends with means nothing.
            tie_embeddings=bool(config.get("tie_word_embeddings", False)) or num_labels > 0,
            num_labels=num_labels,
            attention_bias=attention_bias or family in _BIASED_INPUTS,
            output_bias=bool(config.get("attention_out_bias", attention_bias and family not in _UNBIASED_OUTPUTS)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            convolution_bias=bool(config.get("conv_bias", False)),
            checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}, which a {family} model needs.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise ModelError(f"config.json has a value that is no size or number: {str(error)[:200]}.") from None
    _check_sizes(architecture)
    return architecture


def _activation(config: Mapping[str, Any]) -> str:
    """Return the config's name of the activation. Gemma 1's first configs say gelu, and mean gelu by tanh."""
    name = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    return "gelu_pytorch_tanh" if config.get("model_type") == "gemma" and name == "gelu" else name


def _num_labels(config: Mapping[str, Any]) -> int:
    """Return the number of labels of a transformers class `...ForSequenceClassification`, by default 2; 0 for other models."""
    if "ForSequenceClassification" not in str(config.get("architectures")):
        return 0
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)


def _check_sizes(architecture: Architecture) -> None:
    """Raise ModelError for an absurd size, because memory for tables of these sizes is reserved before the weights are read."""
    sizes = {
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "vocab_size": architecture.vocab_size,
        "max_position_embeddings": architecture.max_position,
        "num_attention_heads": max(layer.num_heads for layer in architecture.layers),
        "head_dim": max(layer.head_size for layer in architecture.layers),
    }
    for name, size in sizes.items():
        limit = _LARGEST.get(name, _LARGEST_SIZE)
        if not 0 < size <= limit:
            raise ModelError(f"config.json says {name} {str(size)[:20]}; 1 to {limit} are possible.")


def _text_decoder(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text decoder's part of a multimodal config; fields that it lacks or has as null come from the outer config."""
    outer, inner = config, config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **{key: value for key, value in inner.items() if value is not None or key not in config}}
    family = str(config.get("model_type", ""))
    if family == "qwen3_vl_moe_text":  # transformers writes true in the inner part, and reads the outer one
        config = {**config, "tie_word_embeddings": outer.get("tie_word_embeddings", False)}
    if outer.get("model_type") == "paligemma" and config.get("use_bidirectional_attention") is None:
        config = {**config, "use_bidirectional_attention": True}
    return {**config, **_TEXT_FAMILIES.get(family, {})}


def _sink_layers(family: str, layers: Sequence[LayerAttention]) -> frozenset[int]:
    """Return the layers with a learned sink logit per head: of MiMo those with a window, of some families all."""
    all_layers = family in ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")
    window_layers = family == "mimo_v2_flash"
    return frozenset(i for i, layer in enumerate(layers) if all_layers or (window_layers and layer.window is not None))


def runnable(architecture: Architecture) -> Architecture:
    """Return the architecture unchanged, after a check that there is code that computes it.

    Raises:
        ModelError: the model can only be planned. The message says what is supported.
    """
    kinds = {rope.kind for rope in architecture.ropes if rope is not None} - set(ROPE_KINDS)
    if kinds:
        raise ModelError(
            f"config.json asks for rope scaling {min(kinds)!r}; supported so far: {', '.join(map(repr, ROPE_KINDS))}."
        )
    activations = _ACTIVATIONS if architecture.has_gates else _UNGATED_ACTIVATIONS
    if architecture.activation not in activations:
        raise ModelError(
            f"config.json asks for hidden_act {architecture.activation!r}; supported so far: "
            f"{', '.join(map(repr, activations))}."
        )
    return architecture


def kv_policy_obstacle(architecture: Architecture) -> str:
    """Return why a model cannot serve requests with a KV policy: a request's own rule for which tokens full-attention layers keep.

    The reason is worded to follow "and" in a message; it is "" if all layers have full attention and so can follow a policy.
    The model's layers decide, not the cache's groups: without a hybrid cache, the groups keep every token, even those that layers
    with a window do not read.
    """
    layers = architecture.layers
    counts = {
        "a latent cache": sum(layer.latent or layer.compression is not None for layer in layers),
        "sliding windows": sum(layer.window is not None for layer in layers),
        "chunked attention": sum(layer.chunk is not None for layer in layers),
        "recurrent states": sum(layer.recurrent is not None for layer in layers),
        "short convolutions": sum(layer.convolution is not None for layer in layers),
    }
    found = [f"{count} of its {len(layers)} layers have {what}" for what, count in counts.items() if count]
    return f"in this one {' and '.join(found)}" if found else ""


def choose_max_model_len(setting: int | None, architecture: Architecture) -> int:
    """Return the longest sequence in tokens: the setting, or the model's number of positions if it is None.

    Raises:
        ConfigError: the setting exceeds the model's positions.
    """
    longest = architecture.max_position
    if setting is not None and setting > longest:
        raise ConfigError(f"--max-model-len is {setting}; the model reaches {longest} tokens. Give at most {longest}.")
    return setting or longest


def with_max_model_len(architecture: Architecture, max_model_len: int | None) -> Architecture:
    """Return the model for sequences of up to `max_model_len` tokens, None for its own length; raises as `choose_max_model_len`."""
    length = choose_max_model_len(max_model_len, architecture)
    return replace(architecture, ropes=tuple(rope and rope.for_length(length) for rope in architecture.ropes))


def with_windows(
    architecture: Architecture, *, window: int | None, sinks: int = 0, pattern: str, chunk: int | None = None
) -> Architecture:
    """Return the model with other attention in the layers that `pattern`, repeated over all layers, marks.

    S marks layers that get a sliding window with sinks, C layers that get chunked attention, and F layers that stay. Example: "SSF"
    changes layers 0, 1, 3, 4, 6 ... Without `window` and `chunk` the model is returned unchanged. Only attention ever changes.

    Raises:
        ConfigError: the model has layers that share a cache, whose windows would have to be equal, or an indexer.
    """
    if window is None and chunk is None:
        return architecture
    if any(layer.reads_cache_of is not None for layer in architecture.layers):
        raise ConfigError("--window and --chunk do not fit a model whose layers share caches; leave them out.")
    if architecture.mla is not None and architecture.mla.indexer is not None:
        raise ConfigError("--window and --chunk do not fit a model whose indexer selects tokens; leave them out.")

    def marked(layer: LayerAttention, letter: str) -> LayerAttention:
        match letter if layer.convolution is None and layer.recurrent is None else "F":
            case "S":
                return replace(layer, window=window, sinks=sinks)
            case "C":
                return replace(layer, chunk=chunk)
            case _:
                return layer

    layers = tuple(marked(layer, pattern[i % len(pattern)]) for i, layer in enumerate(architecture.layers))
    return replace(architecture, layers=layers)
