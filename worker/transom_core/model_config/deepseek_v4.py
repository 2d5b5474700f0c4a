"""Reads the sizes that only DeepSeek V4 has from its `config.json`; missing fields get the published models' values.

This module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]

_SCORES: dict[str, Score] = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
_DEFAULT_HASH_LAYERS = 3  # first layers whose experts are looked up by token id


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Shape:
    """The sizes that only DeepSeek V4 has. `Architecture` has the others: layers, widths and experts."""

    query_rank: int  # rank of the low-rank query projection
    output_groups: int  # groups of heads; each group is projected to `output_rank`
    output_rank: int
    num_index_heads: int  # query heads of an indexer, which selects the compressed entries that a query reads
    index_top_k: int  # entries that an indexer selects for a query
    num_residual_streams: int  # streams that hyper-connections have instead of one residual
    sinkhorn_rounds: int  # rounds in which hyper-connections normalise the matrix that mixes the streams
    hyper_connection_eps: float
    expert_score: Score  # function of the router's logits
    hashed: tuple[bool, ...]  # by layer: whether experts are looked up by token id


def read_deepseek_v4(config: Mapping[str, Any]) -> DeepseekV4Shape:
    """Return the sizes that a config gives.

    Raises:
        TypeError, ValueError: a value is wrong.
    """

    def number(name: str, default: int) -> int:
        return int(config.get(name) or default)

    score = str(config.get("scoring_func") or "sqrtsoftplus")
    if score not in _SCORES:
        raise ValueError(f"scoring_func is {score!r}; supported: {', '.join(_SCORES)}")
    return DeepseekV4Shape(
        query_rank=number("q_lora_rank", 1024),
        output_groups=number("o_groups", 8),
        output_rank=number("o_lora_rank", 1024),
        num_index_heads=number("index_n_heads", 64),
        index_top_k=number("index_topk", 512),
        num_residual_streams=number("hc_mult", 4),
        sinkhorn_rounds=number("hc_sinkhorn_iters", 20),
        hyper_connection_eps=float(config.get("hc_eps") or 1e-6),
        expert_score=_SCORES[score],
        hashed=_hashed_layers(config),
    )


def _hashed_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return, by layer, whether the layer looks up its experts by token id."""
    num_layers = int(config["num_hidden_layers"])
    types = config.get("mlp_layer_types")
    if types is None:
        num_hashed = config.get("num_hash_layers")
        return tuple(
            index < (_DEFAULT_HASH_LAYERS if num_hashed is None else int(num_hashed)) for index in range(num_layers)
        )
    unknown = set(types) - {"hash_moe", "moe"}
    if unknown or len(types) < num_layers:
        raise ValueError(f"mlp_layer_types must be 'hash_moe' or 'moe' for each of {num_layers} layers, not {types}")
    return tuple(kind == "hash_moe" for kind in types[:num_layers])
