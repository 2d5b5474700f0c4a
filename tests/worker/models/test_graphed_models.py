"""Engines that replay their decode steps generate the tokens of engines that do not, in Triton's interpreter.

On CPUs steps are recorded instead of captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from tests.graph_recorder import RecorderDevice
from tests.tiny_checkpoints import tiny_llama
from tests.worker.models.interpreted import check_preempted, run_engine
from transom_kernels.launch import INTERPRETED
from transom_kernels.paged_attention.triton import tuning
from transom_worker.execution.replay import backends

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU"),
]
SPLIT_KEYS = 16  # so that short sequences are shared out over programs, and levels differ
LENGTHS = (9, 5, 26)  # three sequences in a graph for four
SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 32, "window": 6, "sinks": 2, "window_pattern": "SF"}
ROUNDING = 2e-5  # rows that are added change how torch's products round


@contextmanager
def recording() -> Iterator[RecorderDevice]:
    """Engines that are made within record and replay their decode steps."""
    device = RecorderDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "capture_device", lambda _: device)
        yield device
    assert sum(graph.num_replays - 1 for graph in device.graphs) > 0, "nothing was replayed"


def test_hits_repairs_and_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path, layers=2, hidden=48, heads=4, kv_heads=2)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "DECODE_SPLIT_KEYS", SPLIT_KEYS)
        wanted = run_engine(tmp_path, "interpreted", lengths=LENGTHS, **SETTINGS)
        with recording():
            got = run_engine(tmp_path, "interpreted", lengths=LENGTHS, **SETTINGS)
    for situation, wholes in wanted.wholes.items():
        assert [w.token_ids for w in got.wholes[situation]] == [w.token_ids for w in wholes], situation
    for theirs, ours in zip(wanted.logits, got.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=ROUNDING)
    assert got.outcomes["repaired"] > 0
    with recording():
        check_preempted(tmp_path, **SETTINGS)
