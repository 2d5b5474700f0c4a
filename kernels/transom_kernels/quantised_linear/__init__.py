"""Linear layers over weights in 8 or 4 bits, for CPUs.

op                          the operators with their specification
layout, weights             sizes of groups and panels, and the rounding and packing of weights
cpu, cpu_kernel             launches, and the kernels
rounded_rows, tile_product  parts of the kernels: rounding rows of x, and multiplying a block of them by a panel
"""

from transom_kernels.quantised_linear.layout import GROUP
from transom_kernels.quantised_linear.op import quantised_gated_linear, quantised_linear
from transom_kernels.quantised_linear.weights import (
    Format,
    PackedPanels,
    QuantisedRows,
    concatenated,
    pack,
    pack_gated,
    quantise,
)

__all__ = [
    "GROUP",
    "Format",
    "PackedPanels",
    "QuantisedRows",
    "concatenated",
    "pack",
    "pack_gated",
    "quantise",
    "quantised_gated_linear",
    "quantised_linear",
]
