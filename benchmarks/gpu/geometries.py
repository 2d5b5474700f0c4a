"""Shapes of published models, and random weights for them that are made where they are used."""

import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from transom_kernels.moe import MxTensor
from transom_kernels.quantised_linear import GROUP
from transom_worker.models.weights.checkpoint import Mxfp4Tensors, Weights

SLIDING, FULL = "sliding_attention", "full_attention"

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {  # gpt-oss-20b; its experts are in MXFP4, as published
    "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
    "sliding_window": 128, "layer_types": [SLIDING, FULL] * 12, "num_local_experts": 32, "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}  # fmt: skip
MXFP4_EXPERTS = re.compile(r"(gate_up|down)_proj$")  # names of gpt-oss's experts, [E, K, N]; Llama's end in ".weight"
GPT_OSS_120B = GPT_OSS | {"num_hidden_layers": 36, "layer_types": [SLIDING, FULL] * 18, "num_local_experts": 128}
GEOMETRIES = {"llama": LLAMA, "gpt_oss": GPT_OSS, "gpt_oss_120b": GPT_OSS_120B}
_TINY: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def geometry(name: str, *, tiny: bool = False) -> PreTrainedConfig:
    """transformers' config of a geometry; tiny ones keep its kinds of layers."""
    values = dict(GEOMETRIES[name])
    if tiny:
        values |= _TINY
        if "layer_types" in values:
            values |= {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 16}
        if "num_local_experts" in values:
            values |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(
        values.pop("model_type"), **values, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    config.dtype = torch.bfloat16
    return config


def config_json(config: PreTrainedConfig) -> Mapping[str, Any]:
    """What a checkpoint's `config.json` would say."""
    return config.to_dict() | {"dtype": "bfloat16"}


class RandomWeights(Weights):
    """A checkpoint without files: a tensor is a function of its name and shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[str, torch.Tensor] | None = None  # a tensor may be read part by part
        self.names = ()

    @property
    def unread(self) -> tuple[str, ...]:
        """None: nothing is in files."""
        return ()

    def __call__(
        self, name: str, *, shape: tuple[int, ...] | None = None, part: tuple[slice, ...] = ()
    ) -> torch.Tensor:
        """The tensor, or a part of it, in bfloat16 on the device."""
        if shape is None:
            raise ValueError(f"{name} was asked for without a shape, which random weights are made from.")
        if self._last is None or self._last[0] != name:
            self._last = None
            if MXFP4_EXPERTS.search(name):
                blocks, scales = self._make_mxfp4(name, shape)
                whole = MxTensor(blocks=blocks, scales=scales).dequantised().bfloat16().transpose(-1, -2)
            else:
                whole = self._make(name, shape)
            self._last = name, whole
        return self._last[1][part]

    def mxfp4(self, name: str, *, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> Mxfp4Tensors | None:
        """Experts [E, K, N] as gpt-oss stores them: bytes of two elements [E, N, K / 2] and exponents [E, N, K / 32]."""
        if not MXFP4_EXPERTS.search(name):
            return None
        experts, columns, rows = (*part, *[slice(None)] * (3 - len(part)))
        start, stop, _ = columns.indices(shape[1])
        blocks, scales = self._make_mxfp4(name, shape)
        return blocks[experts, rows, start // 2 : stop // 2], scales[experts, rows, start // GROUP : stop // GROUP]

    def close(self) -> None:
        """Forget the last tensor."""
        self._last = None

    def _make_mxfp4(self, name: str, shape: tuple[int, ...]) -> Mxfp4Tensors:
        experts, columns, rows = shape
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        place: dict[str, Any] = {"generator": generator, "device": self._device, "dtype": torch.uint8}
        blocks = torch.randint(256, (experts, rows, columns // 2), **place)
        # Elements are up to 6, so powers around 2 ** -7 keep results near 1.
        return blocks, torch.randint(118, 122, (experts, rows, columns // GROUP), **place)

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        numbers = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        if "norm" in name:
            return numbers.mul_(0.1).add_(1.0)
        return numbers.mul_(0.1 if len(shape) == 1 else shape[-1] ** -0.5)
