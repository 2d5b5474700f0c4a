"""What a worker chooses when it knows its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from transom_core.errors import ConfigError
from transom_core.machine.gpus import NO_DRIVER, Gpu, GpuDriver, TorchBuild
from transom_core.settings.settings import Settings
from transom_worker.engine import startup
from transom_worker.execution.setup import model_loading

H100 = Gpu(name="NVIDIA H100", uuid="GPU-1", memory_bytes=80 << 30, capability=(9, 0))
L4 = Gpu(name="NVIDIA L4", uuid="GPU-2", memory_bytes=24 << 30, capability=(8, 9))


def host(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, cuda: tuple[int, int] = (13, 0)) -> None:
    """A host with these GPUs, which torch can use if the driver runs CUDA 13."""
    driver = GpuDriver(version="580", cuda=cuda, gpus=gpus) if gpus else NO_DRIVER
    for module in (startup, model_loading):
        monkeypatch.setattr(module, "read_driver", lambda: driver)
    monkeypatch.setattr(model_loading, "torch_build", lambda: TorchBuild(version="2.13.0", cuda=(13, 0)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus) and cuda >= (13, 0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, (), (64, 1024, 1)),
        ({}, (H100,), (256, 8192, 2)),
        ({}, (L4,), (128, 2048, 2)),
        ({}, (H100, L4), (128, 2048, 2)),
        ({"device": "cpu"}, (H100,), (64, 1024, 1)),
        ({"device": "cuda"}, (H100,), (256, 8192, 2)),
        ({"tensor_parallel_size": 2}, (), (64, 1024, 2)),
        ({"steps_in_flight": 1, "max_num_seqs": 9, "max_num_batched_tokens": 99}, (H100,), (9, 99, 1)),
    ],
)
def test_batches_as_the_device_allows(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], gpus: tuple[Gpu, ...], expected: tuple[int, int, int]
) -> None:
    host(monkeypatch, *gpus)
    chosen = startup.resolve_for_device(Settings.parse(model="m", **settings).engine_config()).scheduler
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens, chosen.steps_in_flight) == expected


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_never_replaced_by_the_cpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    host(monkeypatch, H100, cuda=(12, 8))
    with pytest.raises(ConfigError, match=f"--device {device}: The driver 580 runs CUDA up to 12.8"):
        model_loading.choose_device(device)
    assert model_loading.choose_device("cpu") == torch.device("cpu")
