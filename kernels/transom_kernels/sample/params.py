"""The sampling parameters of each row, as tensors.

Legend: S rows, C changes to logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOISE_BLOCK = 64
"""Token ids that share one draw of the noise's maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """Of each row. Filters are off at `top_k` 0, `top_p` 1 and `min_p` 0; `temperature` 0 takes the most likely token.

    Changes come first: logit `change_id` of row `change_row` is divided by `change_factor` if positive, multiplied if negative,
    then `change_minus` is subtracted. A row and an id make a pair once at most.
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
