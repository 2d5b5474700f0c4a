"""Opens the checkpoint of a model in whichever format it is: safetensors, quantised safetensors, or GGUF."""

from __future__ import annotations

from transom_worker.model_files.resolve import ModelFiles
from transom_worker.weights.checkpoint import Weights
from transom_worker.weights.gguf_experts import with_hf_experts
from transom_worker.weights.gguf_file import GgufWeights
from transom_worker.weights.quantised_checkpoint import open_quantised
from transom_worker.weights.renamed_weights import text_decoder
from transom_worker.weights.safetensors_files import SafetensorsWeights


def load_weights(files: ModelFiles) -> Weights:
    """Open a model's checkpoint, of a model that also sees or hears its text decoder's; tensors are read when they are asked for.

    Raises:
        ModelError: a file is missing or broken, names it; or quantised in a way that cannot be read.
    """
    if files.is_gguf:
        family, experts = str(files.config["model_type"]), int(files.config.get("num_local_experts", 0))
        return with_hf_experts(GgufWeights(files), family, num_experts=experts)
    plain = SafetensorsWeights(files.path)
    config = files.config.get("quantization_config")
    return text_decoder(plain if config is None else open_quantised(plain, config))
