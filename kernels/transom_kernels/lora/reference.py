"""The weights of `add_lora_`, and the operator in torch: the specification, and the fallback where no kernel runs.

Legend: M rows, K input width, N output width of all parts, S slots, P parts, R the largest rank.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The matrices A and B of the adapters in all slots, for one projection of this rank, which may be several fused ones (parts).

    All matrices have R rows or columns for each part. Those of an adapter with a lower rank are padded with zeros.
    """

    a: torch.Tensor  # [S, P * R, K] in the model's dtype, contiguous; the rows of part p begin at p * R
    b: torch.Tensor  # [S, R, N] in the model's dtype, contiguous
    scales: torch.Tensor  # [S, P] float32, contiguous
    starts: tuple[
        int, ...
    ]  # part p has the output columns starts[p] up to, not including, starts[p + 1]; P + 1 numbers

    @property
    def rank(self) -> int:
        """Return R."""
        return self.b.shape[1]

    def check(self, y_MN: torch.Tensor, x_MK: torch.Tensor, slots_M: torch.Tensor) -> None:
        """Raise ValueError unless the weights' shapes and dtypes fit each other and these tensors."""
        slots, parts = self.scales.shape
        (num_rows, num_outputs), width = y_MN.shape, x_MK.shape[1]
        shapes = [tuple(tensor.shape) for tensor in (self.a, self.b, x_MK, slots_M)]
        wanted = [(slots, parts * self.rank, width), (slots, self.rank, num_outputs), (num_rows, width), (num_rows,)]
        if shapes != wanted:
            raise ValueError(f"a, b, x and slots are {shapes}; y, x and the scales' slots and parts need {wanted}.")
        if self.rank % 8:
            raise ValueError(f"The rank is {self.rank}; pad it to a multiple of 8.")
        if len(self.starts) != parts + 1 or self.starts[0] != 0 or self.starts[-1] != num_outputs:
            raise ValueError(f"starts are {self.starts}; give {parts + 1} columns from 0 to {num_outputs}.")
        dtypes = {tensor.dtype for tensor in (self.a, self.b, x_MK, y_MN)}
        if len(dtypes) > 1 or self.scales.dtype != torch.float32 or slots_M.dtype != torch.int32:
            raise ValueError(f"a, b, x and y are {dtypes}; give one dtype, scales in float32 and slots in int32.")


def add_lora_reference_(y_MN: torch.Tensor, x_MK: torch.Tensor, slots_M: torch.Tensor, weights: LoraWeights) -> None:
    """Add scale * B (A x) of each row's adapter to its row of y, part by part; rows with slot -1 are not changed."""
    for slot in range(len(weights.a)):
        rows = (slots_M == slot).nonzero()[:, 0]
        inner = x_MK[rows].float() @ weights.a[slot].float().T  # [rows, P * R]
        for part, (first, end) in enumerate(pairwise(weights.starts)):
            own = inner[:, part * weights.rank : (part + 1) * weights.rank]
            change = weights.scales[slot, part] * (own @ weights.b[slot, :, first:end].float())
            y_MN[rows, first:end] = (y_MN[rows, first:end].float() + change).to(y_MN.dtype)
