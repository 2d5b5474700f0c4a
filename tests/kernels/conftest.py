"""Triton's kernels are tested in its interpreter, or on a GPU where there is one; see the conftest above."""

from __future__ import annotations

import importlib.util

# Triton has no packages for some platforms, which have no use for its kernels either.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*_triton.py", "*ahead_of_time.py"]
