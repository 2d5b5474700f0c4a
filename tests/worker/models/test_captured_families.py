"""Every family's decode step can be captured in a CUDA graph: it does not need the host, and replays over other inputs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.cpu_threads import NUM_THREADS
from tests.graph_recorder import RecorderDevice
from tests.worker.execution.hand_scheduler import make_runner
from tests.worker.models.test_sharded_families import FAMILIES, make_folder
from transom_core.settings.settings import Settings
from transom_kernels.launch import INTERPRETED, prefer
from transom_worker.execution.replay import backends
from transom_worker.execution.setup import dummy_run

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU"),
]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek_v4"])
def test_a_decode_step_is_captured_and_checked(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, device = make_folder(tmp_path, name), RecorderDevice()
    monkeypatch.setattr(backends, "capture_device", lambda _: device)
    monkeypatch.setattr(dummy_run, "WARM_UP_TOKENS", 1)
    settings = {
        "kv_cache_memory_bytes": "4MiB",
        "block_size": 8,
        "max_model_len": 24,
        "max_num_seqs": 1,
        "num_threads": NUM_THREADS,
    }
    with prefer("interpreted"), caplog.at_level(logging.INFO):
        runner = make_runner(Settings.parse(model=str(folder), dtype="float32", **settings).engine_config())
    assert runner.info.num_graphs == len(device.graphs) == 1
    assert "differs by" not in caplog.text
