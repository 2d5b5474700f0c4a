"""The largest magnitudes of the 8-bit number formats, to which scales map the largest element of a row or head."""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
