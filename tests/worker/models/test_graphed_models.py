"""Engines that replay their decode steps generate the tokens of engines that do not, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.tiny_checkpoints import tiny_llama
from tests.worker.models.graphed import check_graphs, check_preempted_graphs
from transom_kernels.launch import INTERPRETED

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU"),
]
WINDOW = 6


def test_hits_repairs_and_preemption(tmp_path: Path) -> None:
    tiny_llama(tmp_path, layers=2, hidden=48, heads=4, kv_heads=2)
    settings = {"window": WINDOW, "sinks": 2, "window_pattern": "SF"}
    assert check_graphs(tmp_path, **settings).outcomes["repaired"] > 0
    check_preempted_graphs(tmp_path, **settings)
