"""Reads checkpoints in which tensors have other names than the model requests, such as a multimodal model's text decoder."""

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.falcon_h1 import FALCON_H1
from transom_core.model_config.jamba import JAMBA
from transom_core.model_config.lfm2 import LFM2_FAMILIES
from transom_core.model_config.mixture import GRANITE_MIXTURES
from transom_core.model_config.nemotron_h import NEMOTRON_H, blocks_of_layers
from transom_core.model_config.recurrent import KIMI_LINEAR, LING, OLMO_HYBRID
from transom_worker.models.weights.checkpoint import Weights, WeightsView

# Name prefix in a text-only model -> prefix in a multimodal model's checkpoint, first in the older layout, then in the newer one.
_DECODERS = (
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.language_model."},
)
# A part of a name in other families -> the family's own.
_LFM2 = {
    "model.norm.": "model.embedding_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
}
_GRANITE_HYBRID = {
    ".block_sparse_moe.gate.": ".block_sparse_moe.router.layer.",
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    ".block_sparse_moe.shared_experts.": ".shared_mlp.",
    ".mlp.": ".shared_mlp.",
}
_KIMI_LINEAR = {
    **{f".linear_attn.in_proj_{part}.": f".self_attn.{part}_proj." for part in ("q", "k", "v", "b")},
    **{".linear_attn.in_proj_z.": ".self_attn.g_a_proj.", ".linear_attn.in_proj_a.": ".self_attn.f_a_proj."},
    **{".linear_attn.out_proj.": ".self_attn.o_proj.", ".linear_attn.norm.": ".self_attn.o_norm."},
    ".linear_attn.": ".self_attn.",
}
_LING = {
    **{f".linear_attn.in_proj_{part}.": f".attention.{part}_proj." for part in ("q", "k", "v", "b")},
    **{".linear_attn.in_proj_z.": ".attention.g_proj.", ".linear_attn.in_proj_a.": ".attention.f_proj."},
    **{".linear_attn.out_proj.": ".attention.dense.", ".linear_attn.norm.": ".attention.o_norm."},
    **{".linear_attn.": ".attention.", ".self_attn.o_proj.": ".attention.dense.", ".self_attn.": ".attention."},
    **{"model.embed_tokens.": "model.word_embeddings.", ".gate.e_score_correction_bias": ".gate.expert_bias"},
}
_OLMO_HYBRID = {
    **{f".linear_attn.in_proj_{part}.": f".linear_attn.{part}_proj." for part in ("q", "k", "v", "a", "b")},
    **{".linear_attn.in_proj_z.": ".linear_attn.g_proj.", ".linear_attn.out_proj.": ".linear_attn.o_proj."},
    ".linear_attn.norm.": ".linear_attn.o_norm.",
}
_JAMBA = {
    **{"model.norm.": "model.final_layernorm.", ".post_attention_layernorm.": ".pre_ff_layernorm."},
    **{".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."},
}
OWN_NAMES = {
    **dict.fromkeys(LFM2_FAMILIES, _LFM2),
    "lfm3": {name: own for name, own in _LFM2.items() if ".self_attn." not in name},
    **dict.fromkeys(GRANITE_MIXTURES, _GRANITE_HYBRID),
    "granitemoe_swa": {
        ".block_sparse_moe.gate.": ".block_sparse_moe.router.",
        ".block_sparse_moe.shared_experts.": ".shared_mlp.",
    },
    "flint": {".shared_experts.": ".shared_expert."},
    "hy_v3": {".mlp.gate.": ".mlp.router.gate.", ".shared_experts.": ".shared_mlp."},
    "afmoe": {".mlp.gate.": ".mlp.router.gate."},
    "step3p5": {
        **{".mlp.gate.weight": ".moe.gate.weight", ".mlp.gate.e_score_correction_bias": ".moe.router_bias"},
        **{".mlp.shared_experts.": ".share_expert.", ".mlp.experts.": ".moe."},
    },
    KIMI_LINEAR: _KIMI_LINEAR,
    LING: _LING,
    OLMO_HYBRID: _OLMO_HYBRID,
    JAMBA: _JAMBA,
}
_FALCON = {"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"}
_NEMOTRON = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f."}
_IN_A_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.((?P<number>\d+)\.)?(?P<part>\w+)\.")


def text_decoder(weights: Weights) -> Weights:
    """Return a view of the weights in which the text decoder has the names of a text-only model."""
    for prefixes in _DECODERS:
        if any(name.startswith(prefixes["model."]) for name in weights.names):
            return WeightsView(weights, partial(_replace_start, prefixes))
    return weights


def renaming(architecture: Architecture, names: Collection[str] = ()) -> Callable[[str], str] | None:
    """Return the function from other families' names of tensors to those of this one; None if they are the same.

    `names` are the checkpoint's: transformers saves the dense layers of Kimi Linear under the name of layers with experts, and a
    norm of Olmo Hybrid's attention layers under the name that it has in the recurrent ones.
    """
    if architecture.family == OLMO_HYBRID and not any(".post_attention_layernorm." in name for name in names):
        saved = {".post_attention_layernorm.": ".feedforward_layer_norm."}
        return partial(_own_name, _OLMO_HYBRID | saved)
    if architecture.family == KIMI_LINEAR and not any(".mlp." in name for name in names):
        return partial(_own_name, _KIMI_LINEAR | {".mlp.": ".block_sparse_moe."})
    if architecture.family == NEMOTRON_H:
        return partial(_block_name, blocks_of_layers(architecture.num_feed_forwards))
    if architecture.family == FALCON_H1:
        return _falcon_name
    if architecture.family == "hy_v3" and any(".mlp.shared_experts." in name for name in names):
        return partial(_own_name, {".mlp.gate.": ".mlp.router.gate."})  # as some copies have it
    return partial(_own_name, OWN_NAMES[architecture.family]) if architecture.family in OWN_NAMES else None


def _own_name(names: dict[str, str], name: str) -> str:
    return next((name.replace(part, own) for part, own in names.items() if part in name), name)


def _block_name(blocks: Sequence[int], name: str) -> str:
    """Return Nemotron-H's name of a tensor, in which each sublayer is a block `backbone.layers.N`, with `norm` and `mixer`."""
    match = _IN_A_LAYER.match(name)
    if match is None:
        return _replace_start(_NEMOTRON, name)
    part = match["part"]
    follows = part in ("mlp", "post_attention_layernorm")
    block = blocks[int(match["layer"])] + (1 + int(match["number"] or 0) if follows else 0)
    return f"backbone.layers.{block}.{'norm' if part.endswith('layernorm') else 'mixer'}.{name[match.end() :]}"


def _falcon_name(name: str) -> str:
    """Return Falcon-H1's name of a tensor, in which a layer is two of Transom's."""
    match = _IN_A_LAYER.match(name)
    if match is None:
        return _replace_start({"model.norm.": "model.final_layernorm."}, name)
    part = _FALCON.get(match["part"], match["part"])
    return f"model.layers.{int(match['layer']) // 2}.{part}.{name[match.end() :]}"


def _replace_start(prefixes: dict[str, str], name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)
