"""Products with weights in 8 or 4 bits, in torch: the specification of the kernels, and the fallback where no kernel runs.

Rows of the input are rounded, too: to 16-bit integers with a scale for each group of 32 columns, which changes results less than
bfloat16 would. The integers of a group are multiplied exactly, and the groups' products are added in float32, in order. So a row's
result is the same for any number of rows or threads.

Legend: M rows, K input width, N output width, G groups of 32 columns.
"""

import torch
import torch.nn.functional as F

from transom_kernels.quantised_linear.weights import GROUP, SMALLEST, ZERO, PackedPanels, QuantisedRows

LARGEST = 127 * 256  # the largest magnitude of a rounded element


def quantise_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [M, K] as integers from -32512 to 32512 [M, G, 32], and the groups' scales [M, G], both in float32."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    groups = padded.view(len(x), padded.shape[1] // GROUP, GROUP)
    largest = groups.abs().amax(dim=-1)
    inverse = torch.where(largest < SMALLEST, 0.0, torch.full_like(largest, LARGEST) / largest)
    return torch.round(groups * inverse[..., None]), largest * (1 / LARGEST)


def products(x: torch.Tensor, weight: PackedPanels) -> list[torch.Tensor]:
    """Return x @ weight.T + bias [M, N] in float32, group by group, for the weight, or for gate and up."""
    integers, scales = quantise_activations(x)
    return [
        _product(integers, scales, rows) + (0.0 if bias is None else bias)
        for rows, bias in zip(weight.unpacked(), weight.biases(), strict=True)
    ]


def _product(x: torch.Tensor, x_scales: torch.Tensor, weight: QuantisedRows) -> torch.Tensor:
    """Return x @ weight.T [M, N] in float32. The integer products of a group are summed exactly, in float64."""
    total = torch.zeros(len(x), len(weight.levels))
    levels = weight.levels.view(len(weight.levels), -1, GROUP)
    for group in range(x.shape[1]):
        scale = x_scales[:, group, None]
        product = (x[:, group].double() @ (levels[:, group].double() - ZERO[weight.format]).T).float()
        total += product * (scale * weight.scales[:, group].float())
        if weight.minima is not None:
            total += scale * x[:, group].sum(dim=-1, keepdim=True) * weight.minima[:, group].float()
    return total
