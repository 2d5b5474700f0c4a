"""Triton kernels run in its interpreter here; the variable is read when a kernel is defined, so it is set before any is."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
