"""Reads checkpoint tensors by their Hugging Face names, from safetensors and GGUF files, quantised or not.

`load_weights(files)` opens a resolved model; calling the result reads one tensor. No tensor is read before it is requested.
"""

from transom_worker.models.weights.checkpoint import (
    ALL,
    WHOLE,
    Mxfp4Tensors,
    Part,
    StoredGroups,
    Weights,
    read_groups,
    read_mxfp4,
)
from transom_worker.models.weights.load import load_weights
from transom_worker.models.weights.renamed_weights import RenamedWeights

__all__ = [
    "ALL",
    "WHOLE",
    "Mxfp4Tensors",
    "Part",
    "RenamedWeights",
    "StoredGroups",
    "Weights",
    "load_weights",
    "read_groups",
    "read_mxfp4",
]
