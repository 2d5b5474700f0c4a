"""Linear layers over packed weights, and the embedding that shares them.

op                          the operators with their specification
layout, weights             the memory layout of a packed weight, and the packing
cpu, cpu_kernel             launches, and the kernel of linear layers
vector_product              multiplies rows by two panels in vector registers (`cpu/tiles.py` does so with AMX)
gpu                         quantised weights on GPUs
table_kernel                the kernels that pack a weight, and that read the rows of a table
"""

from transom_kernels.linear.op import embedding_rows, gated_linear, heads_linear, linear
from transom_kernels.linear.weights import PackedWeight, can_pack, pack_weight

__all__ = ["PackedWeight", "can_pack", "embedding_rows", "gated_linear", "heads_linear", "linear", "pack_weight"]
