"""Reads `quantization_config`: how a checkpoint's quantised tensors are stored, whichever tool wrote them.

    method               tensors of a layer X                                            numbers
    mxfp4                X_blocks, X_scales (stacks of experts)                          fp4
    fp8, fbgemm_fp8      X.weight, X.weight_scale_inv or X.scale or X.weight_scale       fp8; fp4 if X.weight is int8 (DeepSeek V4)
    awq (gemm)           X.qweight, X.qzeros, X.scales                                   4 bits
    gptq                 X.qweight, X.qzeros, X.scales, X.g_idx                          4 or 8 bits
    compressed-tensors   X.weight_packed, X.weight_scale, X.weight_zero_point, ...,      4 or 8 bits, fp4 (NVFP4, MXFP4)
                         or X.weight, X.weight_scale, X.weight_zero_point                8 bits, fp8
    modelopt             X.weight, X.weight_scale, X.weight_scale_2                      fp8, fp4 (NVFP4)

What a config says of activations (8 bits, static or dynamic) counts on GPUs for fp8 with a scale for each row or tensor alone
(`linear.gpu`): all other layers compute in the model's dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transom_core.errors import ModelError

Group = tuple[int | None, int | None]  # rows and columns of a group; None: all
TENSOR: Group = (None, None)
CHANNEL: Group = (1, None)

_DEFAULT_BLOCK = [128, 128]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_CT_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
_MODELOPT: Mapping[str, Group] = {
    "FP8": TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL,
    "NVFP4": (1, 16),
    "W4A16_NVFP4": (1, 16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How quantised tensors are stored. If there are several `bits` or `groups`, a tensor's shapes show which ones it has."""

    groups: tuple[Group, ...]
    bits: tuple[int, ...] = (4,)  # of integers
    is_symmetric: bool = True  # no zero points but the middle of the integers
    has_order: bool = False  # groups by activation order
    zeros_less_one: bool = False  # zero points are stored less 1
    packs_rows: bool = False  # a word of X.qweight has neighbouring rows (outputs), not columns
    order: tuple[int, ...] | None = None  # the place of each number in a word
    rounds_inputs: bool = False  # inputs of fp8 layers are rounded to fp8, on GPUs
    integers_are_fp4: bool = False  # an int8 X.weight has two fp4 numbers in each byte


def read_scheme(config: Any) -> Scheme:
    """Return the scheme of a `quantization_config`.

    Raises:
        ModelError: the method, or one of its settings, is not supported.
    """
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if isinstance(config, Mapping) and method is None and ("quantization" in config or "quant_algo" in config):
        method, config = "modelopt", config.get("quantization", config)  # ModelOpt's own file, and its first configs
    if method not in _READERS or not isinstance(config, Mapping):
        raise ModelError(
            f"config.json says that the weights are quantised by {method!r}; supported: {', '.join(map(repr, _READERS))}. "
            "Give the unquantised checkpoint."
        )
    return _READERS[method](config)


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size", _DEFAULT_BLOCK)
    if block is None:
        return Scheme(groups=(TENSOR, CHANNEL), rounds_inputs=True)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
        raise ModelError(
            f"config.json has weight_block_size {block!r} in its quantization_config; two numbers of rows and columns with one "
            "scale are needed, such as [128, 128], or null for one scale in all."
        )
    return Scheme(groups=((block[0], block[1]), TENSOR, CHANNEL), rounds_inputs=True, integers_are_fp4=True)


def _awq(config: Mapping[str, Any]) -> Scheme:
    _only("version", str(config.get("version", "gemm")).lower(), ("gemm",))
    return Scheme(
        groups=(_columns(config.get("group_size", config.get("q_group_size", 128))),),
        bits=_bits([config.get("bits", config.get("w_bit", 4))], (4,)),
        is_symmetric=not config.get("zero_point", True),
        packs_rows=True,
        order=_AWQ_ORDER,
    )


def _gptq(config: Mapping[str, Any]) -> Scheme:
    stored = config.get("checkpoint_format") or ("marlin" if config.get("is_marlin_format") else "gptq")
    _only("checkpoint_format", stored, ("gptq", "gptq_v2"))
    # `dynamic` maps patterns of layers' names to settings of these layers alone; empty ones mean that they are not quantised.
    layers = [config, *({**config, **own} for own in (config.get("dynamic") or {}).values() if own)]
    return Scheme(
        groups=tuple(dict.fromkeys(_columns(layer.get("group_size", 128)) for layer in layers)),
        bits=_bits([layer.get("bits") for layer in layers], (4, 8)),
        is_symmetric=all(layer.get("sym", True) for layer in layers),
        has_order=any(layer.get("desc_act", False) for layer in layers),
        zeros_less_one=stored == "gptq",
    )


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    layers = [layer for layer in (config.get("config_groups") or {}).values() if layer.get("weights")]
    for layer in (config, *layers):
        _only("format", layer.get("format") or "pack-quantized", _CT_FORMATS + _CT_FP4)
    _only("sparsity_config format", (config.get("sparsity_config") or {}).get("format") or "dense", ("dense",))
    if config.get("transform_config"):
        raise ModelError(
            "config.json has a transform_config in its quantization_config, which rotates activations between layers; that is not "
            "supported. Give a checkpoint without it."
        )
    weights: list[Mapping[str, Any]] = [layer["weights"] for layer in layers]
    integers = [layer for layer in weights if layer.get("type", "int") == "int"]
    return Scheme(
        groups=tuple(dict.fromkeys(_ct_group(layer) for layer in weights)) or (TENSOR,),
        bits=_bits([layer.get("num_bits") for layer in integers], (4, 8)) or (4,),
        is_symmetric=all(layer.get("symmetric", True) for layer in integers),
        has_order=any(layer.get("actorder") in ("group", "dynamic") for layer in integers),
        rounds_inputs=any(layer.get("input_activations") for layer in layers),
    )


def _ct_group(weights: Mapping[str, Any]) -> Group:
    """Return the groups of a layer's weights, as compressed-tensors names them."""
    strategy, size, block = weights.get("strategy"), weights.get("group_size"), weights.get("block_structure")
    strategy = strategy or ("group" if size and size > 0 else "tensor" if size is None else "channel")
    _only("strategy", strategy, ("tensor", "channel", "group", "tensor_group", "block"))
    if strategy == "block":
        if not isinstance(block, list | tuple) or len(block) != 2:
            raise ModelError(
                f"config.json has block_structure {block!r} in its quantization_config; two numbers are needed."
            )
        return (block[0], block[1])
    return TENSOR if strategy == "tensor" else CHANNEL if strategy == "channel" else _columns(size)


def _modelopt(config: Mapping[str, Any]) -> Scheme:
    algorithms = [str(config.get("quant_algo"))]
    if algorithms == ["MIXED_PRECISION"]:
        algorithms = [str(layer.get("quant_algo")) for layer in (config.get("quantized_layers") or {}).values()]
    for algorithm in algorithms:
        _only("quant_algo", algorithm, tuple(_MODELOPT))
    return Scheme(groups=tuple(dict.fromkeys(_MODELOPT[algorithm] for algorithm in algorithms)), rounds_inputs=True)


_READERS: Mapping[Any, Callable[[Mapping[str, Any]], Scheme]] = {
    "mxfp4": lambda config: Scheme(groups=((1, 32),)),
    "fp8": _fp8,
    "fbgemm_fp8": lambda config: Scheme(groups=(CHANNEL,), rounds_inputs=True),
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


def _columns(size: Any) -> Group:
    """Return groups of `size` columns of a row; -1 means all."""
    if not isinstance(size, int) or size == 0 or size < -1:
        raise ModelError(
            f"config.json has group_size {size!r} in its quantization_config; a number of columns, or -1, is needed."
        )
    return (1, None if size == -1 else size)


def _bits(found: Sequence[Any], allowed: tuple[int, ...]) -> tuple[int, ...]:
    for bits in found:
        _only("bits", bits, allowed)
    return tuple(dict.fromkeys(found))


def _only(what: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ModelError unless a setting has one of the supported values."""
    if value not in allowed:
        raise ModelError(
            f"config.json has {what} {value!r} in its quantization_config; supported: {', '.join(map(repr, allowed))}. "
            "Give the unquantised checkpoint."
        )
