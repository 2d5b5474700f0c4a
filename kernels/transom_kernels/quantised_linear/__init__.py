"""Weights of linear layers in 8 or 4 bits, for CPUs. The operators `linear` and `gated_linear` (`linear/op.py`) multiply by them.

weights        sizes of groups and panels, and the rounding and packing of weights
reference      the products in torch
cpu            the kernels and their launches
row_products   parts of the kernels: rounding rows of x, and multiplying a block of them by a panel
"""

from transom_kernels.quantised_linear.weights import (
    GROUP,
    Format,
    GpuRows,
    PackedPanels,
    QuantisedRows,
    StoredRows,
    concatenated,
    pack,
    pack_gated,
    quantise,
)

__all__ = ["GROUP", "Format", "GpuRows", "PackedPanels", "QuantisedRows", "StoredRows"]
__all__ += ["concatenated", "pack", "pack_gated", "quantise"]
