"""Engines that replay decode steps on CPUs (recorded instead of captured), and equal engines without replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.graph_recorder import RecorderDevice
from tests.worker.models.interpreted import Run, check_preempted, run_engine
from transom_kernels.paged_attention.triton import tuning
from transom_worker.execution.replay import backends

SPLIT_KEYS = 16  # so that short sequences are shared out over programs, and levels differ
SETTINGS = {"max_num_seqs": 2, "max_model_len": 32}
ROUNDING = 2e-5  # rows that are added change how torch's products round


@contextmanager
def recording() -> Iterator[RecorderDevice]:
    """Engines that are made within record and replay their decode steps."""
    device = RecorderDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "capture_device", lambda _: device)
        yield device


def check_graphs(folder: Path, **settings: Any) -> Run:
    """Tokens and logits are those of engines without graphs."""
    settings = SETTINGS | settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "DECODE_SPLIT_KEYS", SPLIT_KEYS)
        wanted = run_engine(folder, "interpreted", **settings)
        with recording() as device:
            got = run_engine(folder, "interpreted", **settings)
    assert device.graphs, "nothing was captured"
    assert sum(graph.num_replays - 1 for graph in device.graphs) > 0, "nothing was replayed"
    for situation, wholes in wanted.wholes.items():
        assert [w.token_ids for w in got.wholes[situation]] == [w.token_ids for w in wholes], situation
    for theirs, ours in zip(wanted.logits, got.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=ROUNDING)
    return got


def check_preempted_graphs(folder: Path, **settings: Any) -> None:
    """Likewise in a pool in which not all prompts fit at once, with two steps in flight."""
    with recording() as device:
        check_preempted(folder, **(settings | {"max_num_seqs": 2}))
    assert sum(graph.num_replays - 1 for graph in device.graphs) > 0, "nothing was replayed"
