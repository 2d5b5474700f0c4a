"""Reads the sizes of a mixture of experts (MoE): which layers have experts, how many, and how tokens are routed to them.

This module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transom_core.model_config.step3p5 import Limits, read_limits

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model. Layers outside `layers` have a dense MLP of `dense_size`."""

    num_experts: int
    num_chosen: int  # experts per token
    inner_size: int  # inner width of one expert
    dense_size: int  # inner width of a dense MLP
    layers: frozenset[int]  # the MoE layers
    latent_size: int = 0  # width in which the routed experts compute; 0: the hidden width
    shared_size: int = 0  # inner width of the expert that every token uses besides its own; 0: there is none
    normalise: bool = True  # routing weights of a token are normalised to a sum of 1, before `scale`
    scale: float = 1.0  # factor of routing weights
    # Experts form groups of equal size, and a token chooses its experts from its best `top_groups` groups.
    num_groups: int = 1
    top_groups: int = 1
    gate_gain: float = 1.0  # gpt-oss: sigmoid(gain * gate)
    clamp: float | None = None  # c: the gate projection is clamped to at most c, the up projection to [-c, c]
    # In Step 3.5: (layer, limits of gates and ups) of routed experts; and of dense MLPs and shared experts
    limits: tuple[tuple[int, Limits], ...] = ()
    dense_limits: tuple[tuple[int, Limits], ...] = ()


# Defaults of transformers' configuration classes, which configs may leave out.
_DEEPSEEK_V3: Config = {
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1},
    **{"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    **{"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
_EIGHT: Config = {"num_local_experts": 8, "num_experts_per_tok": 2}
GRANITE_MIXTURES = ("granitemoe", "granitemoeshared", "granitemoe_swa", "granitemoehybrid")
_DEFAULTS: dict[str, Config] = {
    "deepseek_v2": {
        **{"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0},
        **{"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"},
    },
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), _DEEPSEEK_V3),
    "kimi_linear": {
        **_DEEPSEEK_V3,
        **{"moe_intermediate_size": 1024, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "routed_scaling_factor": 2.446,
    },
    "bailing_hybrid": {
        **{**_DEEPSEEK_V3, "num_experts": 512, "moe_intermediate_size": 768, "first_k_dense_replace": 2}
    },
    "glm_moe_dsa": {**_DEEPSEEK_V3, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {
        **_DEEPSEEK_V3,
        **{"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
        **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1},
    },
    "gpt_oss": {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "qwen2_moe": {
        **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        "shared_expert_intermediate_size": 5632,
    },
    "glm4_moe": {
        **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1},
    },
    "minimax_m2": {"num_local_experts": 256, "num_experts_per_tok": 8},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3_next": {
        **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True},
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_moe_text": {  # all layers are MoE, so there is no width of dense ones
        **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True},
        **{"shared_expert_intermediate_size": 512, "intermediate_size": 0},
    },
    **dict.fromkeys((*GRANITE_MIXTURES, "mixtral"), _EIGHT),
    "olmoe": {"num_experts": 64, "num_experts_per_tok": 8},
    "dots1": {
        **{**_DEEPSEEK_V3, "moe_intermediate_size": 1408, "norm_topk_prob": False, "first_k_dense_replace": 0},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    },
    "mistral4": {
        **{"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048},
        **{"n_shared_experts": 1, "first_k_dense_replace": 0},
    },
    "flint": {
        **{"num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512, "norm_topk_prob": True},
        **{"shared_expert_intermediate_size": 1024, "mlp_only_layers": [0, 1]},
    },
    "hy_v3": {
        **{"num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "num_shared_experts": 1},
        "router_scaling_factor": 2.826,
    },
    "step3p5": {
        **{"n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280},
        "moe_router_scaling_factor": 1.0,
    },
    "ernie4_5_moe": {
        **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    },
    "mellum": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True},
    "afmoe": {
        **{"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "num_shared_experts": 2},
        **{"num_dense_layers": 1, "route_scale": 1.0},
    },
    "exaone_moe": {
        **{**_DEEPSEEK_V3, "num_experts": 64, "moe_intermediate_size": 1024, "first_k_dense_replace": 1},
        **{"num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    },
    "solar_open": {
        **{**_DEEPSEEK_V3, "n_routed_experts": 128, "moe_intermediate_size": 1280, "first_k_dense_replace": 0},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "intermediate_size": 0},
    },
    "jamba": {"num_experts_per_tok": 2},
    "nemotron_h": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "norm_topk_prob": True},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 0, "n_shared_experts": 1},
    },
    "lfm2_moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2},
    "llama4_text": {"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16_384},
    "deepseek_v4": {
        **{"n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "intermediate_size": 0},
        **{"routed_scaling_factor": 1.5, "swiglu_limit": 10.0},
    },
    "gemma4_text": {},
    "mimo_v2_flash": {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
}


def read_mixture(config: Config, num_layers: int) -> Mixture | None:
    """Return the experts that a config describes; None if the model has none.

    Raises:
        KeyError, TypeError, ValueError: a value is missing or wrong.
    """
    family = str(config.get("model_type", ""))
    if family not in _DEFAULTS or (family == "gemma4_text" and not config.get("enable_moe_block")):
        return None
    if family == "granitemoehybrid" and config.get("num_local_experts") == 0:
        return None
    if family == "nemotron_h" and config["mlp_layer_types"] is None:
        return None
    if family == "jamba" and int(config["num_experts"]) == 1:  # Jamba 3B
        return None
    given = {name: value for name, value in config.items() if value is not None}
    mixture = _read(family, {**_DEFAULTS[family], **given}, num_layers)
    if not 1 <= mixture.num_chosen <= mixture.num_experts:
        raise ValueError(f"{mixture.num_chosen} experts per token are to be chosen from {mixture.num_experts}")
    return mixture


def _read(family: str, config: Config, num_layers: int) -> Mixture:
    """Return the experts of a config that has all fields of its family."""
    if family == "ernie4_5_moe":
        config = {**config, "num_experts": config["moe_num_experts"], "num_experts_per_tok": config["moe_k"]}
    experts = config.get("num_local_experts") or config.get("num_experts") or config["n_routed_experts"]
    plain = Mixture(
        num_experts=int(experts),
        num_chosen=int(config["top_k_experts" if family == "gemma4_text" else "num_experts_per_tok"]),
        inner_size=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        dense_size=int(config.get("intermediate_size_mlp") or config["intermediate_size"]),
        layers=frozenset(range(num_layers)),
    )
    match family:
        case "gpt_oss":
            return replace(plain, gate_gain=float(config["swiglu_alpha"]), clamp=float(config["swiglu_limit"]))
        case "flint" | "qwen2_moe" | "qwen3_moe" | "qwen3_next" | "qwen3_5_moe_text":
            return replace(
                plain,
                layers=_qwen_layers(config, num_layers),
                normalise=bool(config.get("norm_topk_prob", False)),
                shared_size=int(config.get("shared_expert_intermediate_size", 0)),
            )
        case "olmoe":
            if config.get("clip_qkv") is not None:
                raise ValueError("clip_qkv, a limit of queries, keys and values, is not supported")
            return replace(plain, normalise=bool(config.get("norm_topk_prob", False)))
        case "mellum":
            kinds = config.get("mlp_layer_types")
            layers = plain.layers if kinds is None else _mimo_layers(config, num_layers)
            return replace(plain, layers=layers, normalise=bool(config["norm_topk_prob"]))
        case "afmoe":
            if not config.get("route_norm", True) or config.get("score_func", "sigmoid") != "sigmoid":
                raise ValueError("route_norm false or a score_func other than sigmoid, which is not supported")
            if int(config.get("n_group") or 1) > 1:
                raise ValueError("n_group above 1, experts chosen by group, is not supported")
            return replace(
                plain,
                layers=frozenset(range(int(config["num_dense_layers"]), num_layers)),
                scale=float(config["route_scale"]),
                shared_size=int(config["num_shared_experts"]) * plain.inner_size,
            )
        case "ernie4_5_moe":
            shared_size = int(config["moe_num_shared_experts"]) * plain.inner_size
            return replace(plain, layers=_ernie_layers(config, num_layers), shared_size=shared_size)
        case "hy_v3":
            return replace(
                plain,
                layers=_mimo_layers(config, num_layers),
                scale=float(config["router_scaling_factor"]),
                shared_size=int(config["num_shared_experts"]) * plain.inner_size,
            )
        case "step3p5":
            return replace(
                plain,
                layers=_step_layers(config, num_layers),
                scale=float(config["moe_router_scaling_factor"]),
                shared_size=int(config["share_expert_dim"]),
                limits=read_limits(config, "swiglu_limits", num_layers),
                dense_limits=read_limits(config, "swiglu_limits_shared", num_layers),
            )
        case "exaone_moe":
            return _deepseek(plain, {**config, "n_shared_experts": config["num_shared_experts"]}, num_layers)
        case family if family in GRANITE_MIXTURES:
            return replace(plain, shared_size=int(config["shared_intermediate_size"]))
        case "jamba":
            return replace(plain, layers=_mimo_layers(config, num_layers), normalise=False)
        case "llama4_text":
            layers = _llama4_layers(config, num_layers)
            return replace(plain, layers=layers, normalise=False, shared_size=plain.inner_size)
        case "deepseek_v4":
            return replace(plain, scale=float(config["routed_scaling_factor"]), clamp=float(config["swiglu_limit"]))
        case (
            "deepseek_v2" | "deepseek_v3" | "deepseek_v32" | "kimi_k2" | "glm4_moe_lite" | "glm_moe_dsa" | "kimi_linear"
        ):
            return _deepseek(plain, config, num_layers)
        case "bailing_hybrid":
            shared = int(config.get("moe_shared_expert_intermediate_size") or plain.inner_size)
            found = _deepseek(plain, {**config, "scoring_func": config.get("score_function", "sigmoid")}, num_layers)
            return replace(found, shared_size=int(config["n_shared_experts"]) * shared)
        case "dots1":  # its config calls the function of scores as the method
            return _deepseek(plain, {**config, "scoring_func": "sigmoid"}, num_layers)
        case "solar_open":
            return _deepseek(plain, {**config, "first_k_dense_replace": 0}, num_layers)
        case "nemotron_h":
            return replace(
                _deepseek(plain, config, num_layers),
                latent_size=int(config.get("moe_latent_size") or 0),
                shared_size=int(config["shared_intermediate_size"]),
            )
        case "lfm2_moe":
            return replace(
                plain,
                layers=_lfm2_layers(config, num_layers),
                normalise=bool(config.get("norm_topk_prob", True)),
                scale=float(config.get("routed_scaling_factor", 1.0)),
            )
        case "glm4_moe" | "mistral4" | "mimo_v2_flash":
            if int(config.get("n_group", 1)) > 1:
                raise ValueError("n_group above 1, experts chosen by group, is not supported")
            is_mimo = family == "mimo_v2_flash"
            return replace(
                plain,
                layers=_mimo_layers(config, num_layers) if is_mimo else _glm_layers(config, num_layers),
                normalise=bool(config.get("norm_topk_prob", True)),
                scale=float(config.get("routed_scaling_factor", 1.0)),
                shared_size=0 if is_mimo else int(config["n_shared_experts"]) * plain.inner_size,
            )
    return plain


def _deepseek(plain: Mixture, config: Config, num_layers: int) -> Mixture:
    """Return the experts of DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash and GLM-5. V2 has softmax scores, the others sigmoids."""
    is_v2 = config["model_type"] == "deepseek_v2"
    method, by_group = str(config["topk_method"]), not is_v2 or config["topk_method"] == "group_limited_greedy"
    methods = ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",)
    score, normalises = "softmax" if is_v2 else "sigmoid", bool(config["norm_topk_prob"])
    if method not in methods or config["scoring_func"] != score or (is_v2 and normalises):
        raise ValueError(
            f"topk_method {method!r}, scoring_func {config['scoring_func']!r} and norm_topk_prob {normalises}; supported are "
            f"{' or '.join(methods)}, {score}{' and false' if is_v2 else ''}"
        )
    groups, top = (int(config.get(name) or 1) if by_group else 1 for name in ("n_group", "topk_group"))
    each, rest = divmod(plain.num_experts, max(1, groups))
    if rest or not 1 <= top <= groups or plain.num_chosen > top * each or (groups > 1 and each < (1 if is_v2 else 2)):
        raise ValueError(
            f"n_group {groups} and topk_group {top} do not fit {plain.num_experts} experts, {plain.num_chosen} per token"
        )
    step, first = int(config.get("moe_layer_freq", 1)), int(config["first_k_dense_replace"])
    kinds = config.get("mlp_layer_types")
    layers = frozenset(range(num_layers)) if kinds is None else _mimo_layers(config, num_layers)
    return replace(
        plain,
        layers=layers if kinds is not None else frozenset(i for i in layers if i >= first and i % step == 0),
        normalise=normalises,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        shared_size=int(config["n_shared_experts"]) * plain.inner_size,
        num_groups=groups,
        top_groups=top,
    )


def _lfm2_layers(config: Config, num_layers: int) -> frozenset[int]:
    if not config.get("use_expert_bias", True):
        raise ValueError("use_expert_bias false, experts chosen by their scores alone, is not supported")
    return frozenset(range(int(config["num_dense_layers"]), num_layers))


def _qwen_layers(config: Config, num_layers: int) -> frozenset[int]:
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    return frozenset(index for index in range(num_layers) if index not in dense and (index + 1) % step == 0)


def _llama4_layers(config: Config, num_layers: int) -> frozenset[int]:
    given = config.get("moe_layers")
    if given is not None:
        return frozenset(int(index) for index in given)
    step = int(config.get("interleave_moe_layer_step", 1))
    return frozenset(range(step - 1, num_layers, step))


def _glm_layers(config: Config, num_layers: int) -> frozenset[int]:
    return frozenset(range(int(config["first_k_dense_replace"]), num_layers))


def _ernie_layers(config: Config, num_layers: int) -> frozenset[int]:
    first, last, step = (int(config[f"moe_layer_{name}"]) for name in ("start_index", "end_index", "interval"))
    last = num_layers - 1 if last == -1 else last
    return frozenset(index for index in range(first, min(last + 1, num_layers)) if (index + 1) % step == 0)


def _step_layers(config: Config, num_layers: int) -> frozenset[int]:
    if config.get("mlp_layer_types"):
        return _mimo_layers(config, num_layers)
    given = config.get("moe_layers_enum")  # such as "3,4,5"
    numbers = range(3, num_layers) if given is None else given.split(",") if isinstance(given, str) else given
    return frozenset(range(num_layers)) & {int(number) for number in numbers if str(number).strip()}


def _mimo_layers(config: Config, num_layers: int) -> frozenset[int]:
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
    return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
