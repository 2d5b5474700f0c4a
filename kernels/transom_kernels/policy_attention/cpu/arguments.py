"""The argument words of the CPU kernels of `policy_attention` that follow those that they share with `paged_attention`.

Legend: B sequences, N table columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from transom_kernels.cpu.arguments import numbers_of
from transom_kernels.paged_attention.cpu.arguments import AttentionArguments


class PolicyArguments(NamedTuple):
    """Compact block tables with their windows, all int32, and the tensor to which `add_mass` adds."""

    key_blocks: torch.Tensor  # [B, N]: logical block of each column
    num_columns: torch.Tensor  # [B]
    windows: torch.Tensor  # [B] tokens; 0: none
    sinks: torch.Tensor  # [B]: keys below this position are sink tokens
    mass: torch.Tensor | None = None  # [B, N] float32
    mass_units: int = 0  # items of `add_mass` for each sequence


POLICY = numbers_of(PolicyArguments, after=AttentionArguments)
