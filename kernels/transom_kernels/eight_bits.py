"""Numbers of eight bits: what several operators must agree on."""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # what a row's or a head's scale maps to
