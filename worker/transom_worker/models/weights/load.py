"""Opens a model's checkpoint of any format: safetensors, quantised safetensors, or GGUF."""

from collections.abc import Mapping
from typing import Any

from transom_core.model_files.resolve import ModelFiles
from transom_core.model_files.text_files import MODELOPT_FILE, read_json
from transom_worker.models.weights.checkpoint import Weights
from transom_worker.models.weights.gguf_experts import with_hf_experts
from transom_worker.models.weights.gguf_file import GgufWeights
from transom_worker.models.weights.quantised_checkpoint import open_quantised
from transom_worker.models.weights.renamed_weights import text_decoder
from transom_worker.models.weights.safetensors_files import SafetensorsWeights


def load_weights(
    files: ModelFiles, *, in_memory: bool = False, for_gpu: bool = False, without_data: bool = False
) -> Weights:
    """Open a model's checkpoint; a tensor is read when it is requested.

    With `in_memory`, for models that compute on CPUs, tensors are copies instead of memory maps of their files
    (`SafetensorsWeights`), and layers take quantised matrices whose format the CPU kernels hold as stored (`keeps_groups`); with
    `for_gpu`, those whose format the GPU kernels hold. For a multimodal model, the result gives the text decoder's weights the
    names that a text-only model has. `without_data` gives tensors of safetensors files on torch's device `meta`, to plan memory.

    Raises:
        ModelError: a file is missing, broken (the message names it), or quantised in a way that cannot be read.
    """
    if files.is_gguf:
        family, experts = str(files.config["model_type"]), int(files.config.get("num_local_experts", 0))
        return with_hf_experts(GgufWeights(files), family, num_experts=experts)
    plain = SafetensorsWeights(files.path, in_memory=in_memory, without_data=without_data)
    config = _quantization_config(files.config)
    if config is None and (files.path / MODELOPT_FILE).exists():
        config = read_json(files.path / MODELOPT_FILE)
    return text_decoder(
        plain
        if config is None
        else open_quantised(plain, config, held_on="gpu" if for_gpu else "cpu" if in_memory else None)
    )


def _quantization_config(config: Mapping[str, Any]) -> Any:
    """Return what a config.json says of quantised weights; multimodal models may say it of the text decoder alone."""
    inner = config.get("text_config")
    # compressed-tensors wrote the second name until 2024
    found = config.get("quantization_config", config.get("compression_config"))
    return inner.get("quantization_config") if found is None and isinstance(inner, Mapping) else found
