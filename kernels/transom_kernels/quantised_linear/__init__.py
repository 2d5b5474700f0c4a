"""Linear layers over weights in 8 or 4 bits, for CPUs."""

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
