"""Reads the sizes of multi-head latent attention (MLA: DeepSeek V2 to V3.2, Kimi K2, Mistral 4, GLM-4.7-Flash, GLM-5, Youtu, Ling
3). This module imports no torch.

A token's *latent row* is what its keys and values of all heads are computed from: `latent_rank` numbers, and `rope_size` rotated
ones that all heads share. The cache keeps this row alone. Example, DeepSeek V3: 512 + 64 numbers a token and layer, where keys and
values of 128 heads would be 128 * (192 + 128).

In DeepSeek V3.2 and GLM-5 an *indexer* selects the tokens that a query reads. It keeps a key of its own for each token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transom_core.model_config.rope import Rope, yarn_magnitude

INDEXED_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
MLA_FAMILIES = (
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "mistral4", "glm4_moe_lite", "youtu", "kimi_linear"),
    "bailing_hybrid",
    *INDEXED_FAMILIES,
)
_INDEX_FIELDS = (
    *("index_n_heads", "index_head_dim", "index_topk", "indexer_types", "indexer_rope_interleave"),
    *("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    "index_share_for_mtp_iteration",  # of layers that are not read
)
LATENT_NORM_EPS = (
    1e-6  # of the norms of latent rows and low-rank queries; the config's rms_norm_eps is for the other norms
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The indexer of the layers whose queries read no more than `top_k` tokens."""

    num_heads: int
    size: int  # numbers of a query head, and of the key of a token
    top_k: int
    interleaved: bool  # a rotary pair is elements (2i, 2i + 1), not elements half of the rotated width apart
    layers: frozenset[int]  # layers that select; each other layer reads what the last of these before it has selected


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """The widths of a layer's projections, by head where not said otherwise."""

    query_rank: int  # width of the low-rank queries of all heads; 0: queries are projected at once
    latent_rank: int  # width of a latent row without its rotated part
    plain_size: int  # numbers of a query and key that do not rotate
    rope_size: int  # numbers that rotate
    value_size: int
    scale: float  # of attention scores
    indexer: Indexer | None = None
    gates_heads: bool = False  # the sigmoid of a projection multiplies each head's output


def read_mla(config: Mapping[str, Any], rope: Rope | None) -> Mla | None:
    """Return the sizes of a config; None if its family has no MLA. `rope` is that of all layers; None: nothing rotates.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("model_type") not in MLA_FAMILIES:
        return None
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: int(config[name]) for name in names}
    sizes["q_lora_rank"] = query_rank = 0 if config["q_lora_rank"] is None else int(config["q_lora_rank"])
    if min(sizes[name] for name in names) < 1 or query_rank < 0 or sizes["qk_rope_head_dim"] % 2:
        raise ValueError(f"{sizes}: all must be at least 1 (q_lora_rank may be null), and qk_rope_head_dim even")
    parameters = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    plain, rotated = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    share = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    # Mistral 4's is the share of a whole head, Ling's of a head of its delta nets.
    head = {"mistral4": plain + rotated, "bailing_hybrid": int(config.get("linear_head_dim") or 0)}
    if share not in (1.0, rotated / (head.get(str(config["model_type"])) or rotated)):
        raise ValueError("partial_rotary_factor must be 1, since qk_rope_head_dim says how much of a head rotates")
    # YaRN stretches positions; queries and keys are each multiplied by this magnitude, so scores by its square.
    all_dim = float(parameters.get("mscale_all_dim") or 0.0) if rope is not None and rope.kind != "default" else 0.0
    magnitude = yarn_magnitude(rope.factor, all_dim) if rope is not None and all_dim else 1.0
    return Mla(
        query_rank=query_rank,
        latent_rank=sizes["kv_lora_rank"],
        plain_size=plain,
        rope_size=rotated,
        value_size=sizes["v_head_dim"],
        gates_heads=config["model_type"] == "bailing_hybrid",
        scale=(plain + rotated) ** -0.5 * magnitude**2,
        indexer=_read_indexer(config, sizes),
    )


def index_sizes(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the layers that select tokens, each with the field `index_head_dim`; empty if the family has no indexer.

    `indexer_types` lists them, or else `index_topk_pattern`, or `index_topk_freq` and `index_skip_topk_offset` (GLM-5.1).

    Raises:
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    if config.get("model_type") not in INDEXED_FAMILIES:
        return {}
    if unknown := min((name for name in config if name.startswith("index") and name not in _INDEX_FIELDS), default=""):
        raise ValueError(f"the field {unknown!r} is not known of {config['model_type']} models")
    num_layers, types = int(config["num_hidden_layers"]), config.get("indexer_types")
    if types is None and config.get("index_topk_pattern") is not None:
        types = [{"F": "full", "S": "shared"}.get(one, one) for one in config["index_topk_pattern"]]
    if types is None:
        every, first = max(1, int(config.get("index_topk_freq", 1))), int(config.get("index_skip_topk_offset", 2))
        types = ["shared" if max(0, i - first + 1) % every else "full" for i in range(num_layers)]
    if config["model_type"] == "deepseek_v32" and "shared" in types:
        raise ValueError("indexer_types has 'shared', which deepseek_v32 models do not have")
    if len(types) != num_layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise ValueError(f"indexer_types must be {num_layers} times 'full' or 'shared', the first one 'full': {types}")
    return {index: {"index_head_dim": config["index_head_dim"]} for index, kind in enumerate(types) if kind == "full"}


def _read_indexer(config: Mapping[str, Any], mla: Mapping[str, int]) -> Indexer | None:
    """Return the indexer of a config; None if the family has none. `mla` are the sizes of its attention."""
    layers = index_sizes(config)
    if not layers:
        return None
    names = ("index_n_heads", "index_head_dim", "index_topk")
    heads, size, top_k = (int(config[name]) for name in names)
    if min(heads, top_k) < 1 or size < mla["qk_rope_head_dim"] or not mla["q_lora_rank"]:
        raise ValueError(
            f"{', '.join(f'{name} {config[name]}' for name in names)}: heads and tokens must be at least 1, a head as wide as "
            f"qk_rope_head_dim {mla['qk_rope_head_dim']}, and q_lora_rank not null"
        )
    interleaved = bool(config.get("indexer_rope_interleave", config["model_type"] == "glm_moe_dsa"))
    return Indexer(num_heads=heads, size=size, top_k=top_k, interleaved=interleaved, layers=frozenset(layers))
