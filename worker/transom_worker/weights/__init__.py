"""Checkpoint tensors by their Hugging Face names, whatever the format on disk.

`load_weights(files)` opens a resolved model; calling the result reads one tensor. Nothing is read before it is asked for.
"""

from transom_worker.weights.checkpoint import ALL, WHOLE, Mxfp4Tensors, Part, Weights, read_mxfp4
from transom_worker.weights.load import load_weights
from transom_worker.weights.renamed_weights import RenamedWeights

__all__ = ["ALL", "WHOLE", "Mxfp4Tensors", "Part", "RenamedWeights", "Weights", "load_weights", "read_mxfp4"]
