"""Builds the model of an architecture: maps the family (`model_type` of config.json) to its class, or to the shared
`Decoder` with the family's `Style`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from transom_core.config import LoraConfig
from transom_core.errors import ConfigError
from transom_core.model_config.architecture import Architecture
from transom_core.model_config.mamba import MAMBA_FAMILIES
from transom_core.model_config.mixture import GRANITE_MIXTURES
from transom_core.model_config.recurrent import DELTA_NET_FAMILIES
from transom_core.model_config.step3p5 import STEP
from transom_worker.models.adapter_loading import load_adapter
from transom_worker.models.decoder import Decoder
from transom_worker.models.deepseek_v4.v4_model import DeepseekV4
from transom_worker.models.gemma4 import Gemma4
from transom_worker.models.layers.adapters import Adapters
from transom_worker.models.layers.quantisation import Quantization
from transom_worker.models.loading import Loader
from transom_worker.models.mixtures import MIXTURE_STYLES
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.models.style import DENSE_STYLES
from transom_worker.models.weights.checkpoint import Weights, WeightsView
from transom_worker.models.weights.gguf_experts import PerExpertNames
from transom_worker.models.weights.renamed_weights import renaming, text_decoder
from transom_worker.models.weights.scaled_weights import ScaledWeights
from transom_worker.models.weights.split_projections import FUSED_MLPS, SplitProjections

FAMILIES: dict[str, Callable[[Architecture, Loader], Model]] = {
    **{family: partial(Decoder, style=style) for family, style in (DENSE_STYLES | MIXTURE_STYLES).items()},
    "gemma4_text": Gemma4,
    "deepseek_v4": DeepseekV4,
}


def build_model(
    architecture: Architecture,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    quantization: Quantization = "none",
    parallel: Parallel | None = None,
    lora: LoraConfig | None = None,
) -> Model:
    """Build this rank's part of the model on `device`, with weights converted, fused, packed or quantised.

    `weights` gives the rank's part of each tensor by its Hugging Face name. "lm_head.weight" is read only if the head is not tied.
    With `lora` the model takes LoRA adapters.

    The caller has checked that the family is supported (`runnable`) and that the ranks can share the model (`check_size`).

    Raises:
        ModelError: a tensor is missing or has another shape than the architecture's.
        ConfigError: this device and dtype do not support the quantisation, or the family takes no adapters.
    """
    if lora is not None and architecture.family == "deepseek_v4":
        raise ConfigError(
            "--enable-lora: DeepSeek V4's projections are not those of the other families, and take no adapters; serve without it."
        )
    load = Loader(
        weights=weights,
        dtype=dtype,
        device=torch.device(device),
        quantization=quantization,
        parallel=parallel or Parallel(),
        adapters=None if lora is None else Adapters(lora, dtype, torch.device(device)),
    )
    view = partial(_by_own_names, architecture, renaming(architecture, weights.names))
    load = replace(load, weights=view(weights))
    model = FAMILIES[architecture.family](architecture, load)
    if architecture.num_labels:
        shape = (architecture.num_labels, architecture.hidden_size)
        model.score_LN = load.tensor("score.weight", torch.float32, shape=shape)
        model.weight_bytes += model.score_LN.nbytes
    if load.adapters is not None:
        model.load_adapter = partial(load_adapter, load.adapters, lambda stored: view(text_decoder(stored)))
    return model


def _by_own_names(architecture: Architecture, rename: Callable[[str], str] | None, weights: Weights) -> Weights:
    """Return a checkpoint's weights under the names by which the model reads them, apart and with their factors."""
    if rename is not None:
        weights = WeightsView(weights, rename)
    if architecture.family == STEP and architecture.mixture is not None:
        stacks = {part: part for part in ("gate_proj", "up_proj", "down_proj")}
        weights = PerExpertNames(weights, stacks, num_experts=architecture.mixture.num_experts)
    if architecture.family in (*DELTA_NET_FAMILIES, *MAMBA_FAMILIES, *GRANITE_MIXTURES, *FUSED_MLPS):
        weights = SplitProjections(weights, architecture)
    factors = architecture.scales.projections
    return ScaledWeights(weights, factors) if factors else weights
