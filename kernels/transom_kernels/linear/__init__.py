"""Linear layers over packed weights, and the embedding that shares them."""

from transom_kernels.linear.op import Activation, RowNorm, embedding_rows, gated_linear, linear
from transom_kernels.linear.weights import PackedWeight, can_pack, pack_weight

__all__ = [
    "Activation",
    "PackedWeight",
    "RowNorm",
    "can_pack",
    "embedding_rows",
    "gated_linear",
    "linear",
    "pack_weight",
]
