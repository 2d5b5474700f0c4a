"""Threads for a real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    """Of torch, for a module that computes with a real model; other tests have `cpu_threads.NUM_THREADS`."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
