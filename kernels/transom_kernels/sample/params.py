"""The sampling parameters of a step's rows, as tensors: the arguments of `op.sample`.

Legend: S rows, C changes to logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOISE_BLOCK = 64
"""Token ids of a noise block. The largest noise of a block is one random number; see `reference.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """Temperature, filters, noise key and logit changes of each row.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. `temperature` 0 takes the most likely token (greedy).

    Logit changes (penalties and biases) come first: the logit of token `change_id` in row `change_row` is divided by
    `change_factor` if the logit is positive, and multiplied by it otherwise; then `change_minus` is subtracted. A pair of row and
    id occurs at most once.
    """

    temperature: torch.Tensor  # [S] float32
    top_k: torch.Tensor  # [S] int32
    top_p: torch.Tensor  # [S] float32
    min_p: torch.Tensor  # [S] float32
    keys: torch.Tensor  # [S] int64: the noise is a function of a row's key and the token id
    change_row: torch.Tensor | None = None  # [C] int64
    change_id: torch.Tensor | None = None  # [C] int64
    change_factor: torch.Tensor | None = None  # [C] float32
    change_minus: torch.Tensor | None = None  # [C] float32
