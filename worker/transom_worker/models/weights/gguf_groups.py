"""Splits the blocks of GGUF's Q8_0, Q4_0 and Q4_1 into levels, scales and minima, without changing a number.

A block holds 32 columns of a row, in bytes:

    Q8_0   scale (float16), 32 signed integers
    Q4_0   scale (float16), 16 bytes of two levels: the low halves are columns 0 to 15, the high halves columns 16 to 31
    Q4_1   scale (float16), minimum (float16), 16 bytes of two levels as in Q4_0
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from transom_worker.models.weights.checkpoint import StoredGroups

STORED_KINDS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)


def stored_groups(blocks: npt.NDArray[np.uint8], kind: Kind) -> StoredGroups:
    """Return the levels, scales and minima of blocks [N, K / 32, bytes], whose format is one of `STORED_KINDS`."""
    num_rows, num_groups, _ = blocks.shape
    head = 4 if kind is Kind.Q4_1 else 2
    factors = torch.from_numpy(np.ascontiguousarray(blocks[:, :, :head])).view(torch.float16)
    body = torch.from_numpy(np.ascontiguousarray(blocks[:, :, head:]))
    # Flipping the sign bit of a signed byte adds 128, the format's zero.
    levels = body ^ 0x80 if kind is Kind.Q8_0 else torch.cat((body & 15, body >> 4), dim=-1)
    return StoredGroups(
        format="int8" if kind is Kind.Q8_0 else "int4" if kind is Kind.Q4_0 else "int4_min",
        levels=levels.view(num_rows, 32 * num_groups),
        scales=factors[..., 0].contiguous(),
        minima=factors[..., 1].contiguous() if kind is Kind.Q4_1 else None,
    )
