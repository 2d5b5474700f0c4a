"""Reads the sizes of multi-head latent attention (MLA: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Youtu). No torch here.

A token's *latent row* is what its keys and values of all heads are computed from: `latent_rank` numbers, and `rope_size` rotated
ones that all heads share. The cache keeps this row alone. Example, DeepSeek V3: 512 + 64 numbers a token and layer, where keys and
values of 128 heads would be 128 * (192 + 128).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transom_core.model_config.rope import Rope, yarn_magnitude

MLA_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu")
LATENT_NORM_EPS = (
    1e-6  # of the norms of latent rows and low-rank queries; the config's rms_norm_eps is for the other norms
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """The widths of a layer's projections, by head where not said otherwise."""

    query_rank: int  # width of the low-rank queries of all heads; 0: queries are projected at once
    latent_rank: int  # width of a latent row without its rotated part
    plain_size: int  # numbers of a query and key that do not rotate
    rope_size: int  # numbers that rotate
    value_size: int
    scale: float  # of attention scores


def read_mla(config: Mapping[str, Any], rope: Rope) -> Mla | None:
    """Return the sizes of a config; None if its family has no MLA. `rope` is that of all layers.

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
    if float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor must be 1, since qk_rope_head_dim says how much of a head rotates")
    plain, rotated = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    # YaRN stretches positions; queries and keys are each multiplied by this magnitude, so scores by its square.
    all_dim = float(parameters.get("mscale_all_dim") or 0.0) if rope.kind != "default" else 0.0
    magnitude = yarn_magnitude(rope.factor, all_dim) if all_dim else 1.0
    return Mla(
        query_rank=query_rank,
        latent_rank=sizes["kv_lora_rank"],
        plain_size=plain,
        rope_size=rotated,
        value_size=sizes["v_head_dim"],
        scale=(plain + rotated) ** -0.5 * magnitude**2,
    )
