"""Triton kernels run in its interpreter here; the variable is read when a kernel is defined, so it is set before any is."""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Triton has no packages for some platforms, which have no use for its kernels either.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*_triton.py", "*ahead_of_time.py"]
