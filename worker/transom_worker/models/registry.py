"""Builds the model of an architecture: maps the family (`model_type` of config.json) to its class, or to the shared
`Decoder` with the family's `Style`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from transom_core.model_config.architecture import Architecture
from transom_core.model_config.mamba import MAMBA_FAMILIES
from transom_core.model_config.recurrent import DELTA_NET_FAMILIES
from transom_worker.models.decoder import Decoder
from transom_worker.models.deepseek_v4.v4_model import DeepseekV4
from transom_worker.models.gemma4 import Gemma4
from transom_worker.models.layers.quantisation import Quantization
from transom_worker.models.loading import Loader
from transom_worker.models.mixtures import MIXTURE_STYLES
from transom_worker.models.model import Model
from transom_worker.models.parallel.communicator import Parallel
from transom_worker.models.style import DENSE_STYLES
from transom_worker.models.weights.checkpoint import Weights
from transom_worker.models.weights.renamed_weights import RenamedWeights, renaming
from transom_worker.models.weights.scaled_weights import ScaledWeights
from transom_worker.models.weights.split_projections import SplitProjections

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
) -> Model:
    """Build this rank's part of the model on `device`, with weights converted, fused, packed or quantised.

    `weights` gives the rank's part of each tensor by its Hugging Face name. "lm_head.weight" is read only if the head is not tied.

    The caller has checked that the family is supported (`runnable`) and that the ranks can share the model (`check_size`).

    Raises:
        ModelError: a tensor is missing or has another shape than the architecture's.
        ConfigError: this device and dtype do not support the quantisation.
    """
    load = Loader(
        weights=weights,
        dtype=dtype,
        device=torch.device(device),
        quantization=quantization,
        parallel=parallel or Parallel(),
    )
    if (rename := renaming(architecture, weights.names)) is not None:
        load = replace(load, weights=RenamedWeights(weights, rename))
    if architecture.family in (*DELTA_NET_FAMILIES, *MAMBA_FAMILIES, "phi3"):
        load = replace(load, weights=SplitProjections(load.weights, architecture))
    if architecture.scales.projections:
        load = replace(load, weights=ScaledWeights(load.weights, architecture.scales.projections))
    model = FAMILIES[architecture.family](architecture, load)
    if architecture.num_labels:
        shape = (architecture.num_labels, architecture.hidden_size)
        model.score_LN = load.tensor("score.weight", torch.float32, shape=shape)
        model.weight_bytes += model.score_LN.nbytes
    return model
