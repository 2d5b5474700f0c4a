"""What the driver reports is read as it is, CUDA_VISIBLE_DEVICES counts as CUDA counts it, and what keeps a GPU idle is named."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from transom_core.machine.gpus import (
    NO_DRIVER,
    Gpu,
    GpuDriver,
    TorchBuild,
    gpu_problem,
    read_driver,
    torch_build,
    visible_gpus,
)

H100 = Gpu(name="NVIDIA H100", uuid="GPU-aaaa-1", memory_bytes=80 << 30, capability=(9, 0))
L4 = Gpu(name="NVIDIA L4", uuid="GPU-bbbb-2", memory_bytes=24 << 30, capability=(8, 9))
T4 = Gpu(name="Tesla T4", uuid="GPU-cccc-3", memory_bytes=16 << 30, capability=(7, 5))
DRIVER = GpuDriver(version="580.65", cuda=(13, 0), gpus=(H100, L4))
TORCH = TorchBuild(version="2.13.0", cuda=(13, 0))


class NoLibrary(Exception):
    """NVML's error."""


def fake_nvml(driver: GpuDriver | None) -> SimpleNamespace:
    def init() -> None:
        if driver is None:
            raise NoLibrary

    gpus = () if driver is None else driver.gpus
    return SimpleNamespace(
        NVMLError=NoLibrary,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion_v2=lambda: DRIVER.cuda[0] * 1000 + DRIVER.cuda[1] * 10,
        nvmlSystemGetDriverVersion=lambda: DRIVER.version,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetName=lambda gpu: gpu.name,
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=gpu.memory_bytes),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu.capability,
    )


@pytest.mark.parametrize("driver", [None, DRIVER, replace(DRIVER, gpus=())])
def test_the_driver_is_read(monkeypatch: pytest.MonkeyPatch, driver: GpuDriver | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(driver))
    assert read_driver() == (driver or NO_DRIVER)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (H100, L4)),
        ("", ()),
        ("-1", ()),
        ("1", (L4,)),
        ("1,-1,0", (L4,)),
        ("0,2,1", (H100,)),
        (" 1 , 0 ", (L4, H100)),
        ("GPU-bbbb", (L4,)),
        ("GPU-unknown", ()),
        ("MIG-12345678,MIG-87654321", (H100, H100)),
    ],
)
def test_visible_gpus_as_cuda_counts_them(visible: str | None, expected: tuple[Gpu, ...]) -> None:
    assert visible_gpus((H100, L4), visible) == expected


def test_the_installed_torch_is_read_from_its_files() -> None:
    torch = pytest.importorskip("torch")
    build = torch_build()
    assert build.version == torch.__version__
    assert torch.version.cuda == (None if build.cuda is None else ".".join(map(str, build.cuda)))


@pytest.mark.parametrize(
    ("driver", "torch", "variables", "message"),
    [
        (DRIVER, TORCH, {}, None),
        (replace(DRIVER, cuda=(13, 2)), TORCH, {}, None),
        (NO_DRIVER, TORCH, {}, "has no NVIDIA driver"),
        (replace(DRIVER, gpus=()), TORCH, {}, "580.65 finds no GPU"),
        (DRIVER, TORCH, {"CUDA_VISIBLE_DEVICES": "-1"}, "'-1', which leaves none of this machine's 2 GPUs"),
        (DRIVER, TorchBuild(version="2.13.0+cpu", cuda=None), {}, "torch 2.13.0[+]cpu is a build for CPUs"),
        (
            replace(DRIVER, cuda=(12, 8)),
            TORCH,
            {},
            "580.65 runs CUDA up to 12.8, and torch 2.13.0 is built for CUDA 13.0",
        ),
        (replace(DRIVER, gpus=(H100, T4)), TORCH, {}, "Tesla T4 has compute capability 7.5; .* need 8.0"),
        (replace(DRIVER, gpus=(H100, T4)), TORCH, {"CUDA_VISIBLE_DEVICES": "0"}, None),
        (DRIVER, TORCH, {"PATH": ""}, "no gcc or clang on PATH.*apt-get install gcc libc6-dev"),
        (DRIVER, TORCH, {"CC": "no-such-compiler"}, "no no-such-compiler on PATH"),
    ],
)
def test_what_keeps_a_gpu_idle_is_named(
    tmp_path: Path, driver: GpuDriver, torch: TorchBuild, variables: dict[str, str], message: str | None
) -> None:
    (tmp_path / "Python.h").touch()
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    problem = gpu_problem(driver, torch, {"PATH": str(tmp_path)} | variables, python_include=str(tmp_path))
    if message is None:
        assert problem is None
    else:
        assert problem is not None
        with pytest.raises(ValueError, match=message):
            raise ValueError(problem)


def test_pythons_headers_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "clang").touch(mode=0o755)
    problem = gpu_problem(DRIVER, TORCH, {"PATH": str(tmp_path)}, python_include=str(tmp_path))
    assert problem is not None
    assert "has no Python.h. Install them (Debian and Ubuntu: apt-get install python3-dev)" in problem
