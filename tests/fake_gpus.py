"""GPUs that are not there: an NVML and CUDA calls that report them, for the code that reads the driver and chooses devices.

    install(driver, monkeypatch.setattr)     in this process
    described(driver, ...)                   the value of `VARIABLE` with which a rank calls `install_from_environment`

Nothing can be computed on them: in ranks that tests start so, the CPU computes after the rank has chosen and opened its GPU.
"""

import base64
import importlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from transom_core.machine import gpu_checks
from transom_core.machine.gpus import NO_DRIVER, Gpu, GpuDriver, visible_gpus
from transom_worker.execution.setup import model_loading

VARIABLE = "TRANSOM_FAKE_GPUS"
TORCH = gpu_checks.TorchBuild(version="2.13.0", cuda=(13, 0))
H100 = Gpu(name="NVIDIA H100", uuid="GPU-aaaa-1", memory_bytes=80 << 30, capability=(9, 0))
L4 = Gpu(name="NVIDIA L4", uuid="GPU-bbbb-2", memory_bytes=24 << 30, capability=(8, 9))
LOST = Gpu(name="GPU 0", uuid="", memory_bytes=0, capability=(0, 0), error="GPU is lost")
T4 = Gpu(name="Tesla T4", uuid="GPU-cccc-3", memory_bytes=16 << 30, capability=(7, 5))


def part(number: int, gib: int = 20) -> Gpu:
    """Part `number` of the H100, as NVML reports it."""
    return Gpu(
        name=f"NVIDIA H100 MIG 2g.{gib}gb",
        uuid=f"MIG-part-{number}",
        memory_bytes=gib << 30,
        capability=H100.capability,
        old_uuid=f"MIG-{H100.uuid}/{number}/0",
    )


def driver_of(*gpus: Gpu, cuda: tuple[int, int] = (13, 0), error: str = "") -> GpuDriver:
    """The driver of a host with these GPUs."""
    return GpuDriver(version="580.65", cuda=cuda, gpus=gpus, error=error)


def several(count: int, gpu: Gpu = H100) -> tuple[Gpu, ...]:
    """GPUs of one kind, with the UUIDs GPU-0, GPU-1, ..."""
    return tuple(
        Gpu(name=gpu.name, uuid=f"GPU-{i}", memory_bytes=gpu.memory_bytes, capability=(9, 0)) for i in range(count)
    )


def install(driver: GpuDriver, set_attribute: Callable[[Any, str, Any], None], *, broken: str = "") -> None:
    """Have NVML and torch's CUDA calls report this host; CUDA cannot use the GPU with the UUID `broken`."""
    for name, function in _nvml(driver).items():
        set_attribute(pynvml, name, function)

    def is_available() -> bool:
        gpus = visible_gpus(driver)
        return bool(gpus) and driver.cuda[0] >= 13 and not gpus[0].error

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        gpu = visible_gpus(driver)[0]
        if gpu.uuid == broken:
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")
        return gpu.memory_bytes, gpu.memory_bytes

    set_attribute(torch.cuda, "is_available", is_available)
    set_attribute(torch.cuda, "get_device_capability", lambda device: visible_gpus(driver)[0].capability)
    set_attribute(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90a", "compute_110"])
    set_attribute(torch.cuda, "mem_get_info", mem_get_info)
    set_attribute(model_loading, "torch_build", lambda: TORCH)
    set_attribute(gpu_checks, "_compiler_problem", lambda *_: None)


def host(monkeypatch: pytest.MonkeyPatch, driver: GpuDriver, visible: str | None = None) -> None:
    """Have this process be on a host with this driver, which torch can use if it runs CUDA 13, with CUDA_VISIBLE_DEVICES."""
    install(driver, monkeypatch.setattr)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def _nvml(driver: GpuDriver) -> dict[str, Any]:
    def init() -> None:
        if driver.error:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        if driver == NO_DRIVER:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def handle(index: int) -> Gpu:
        if driver.gpus[index].error and not driver.gpus[index].uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return driver.gpus[index]

    def memory(gpu: Gpu) -> SimpleNamespace:
        if not gpu.memory_bytes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=gpu.memory_bytes)

    def mig_mode(gpu: Gpu) -> list[int]:
        if gpu.capability < (8, 0):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(gpu.parts or gpu.error))] * 2

    def mig_device(gpu: Gpu, slot: int) -> Gpu:
        if slot % 2 or slot // 2 >= len(gpu.parts):  # parts in every other slot
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.parts[slot // 2]

    return {
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: driver.cuda[0] * 1000 + driver.cuda[1] * 10,
        "nvmlSystemGetDriverVersion": lambda: driver.version,
        "nvmlDeviceGetCount": lambda: len(driver.gpus),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetName": lambda gpu: gpu.name,
        "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu.capability,
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": mig_device,
        "nvmlDeviceGetGpuInstanceId": lambda gpu: int(gpu.old_uuid.split("/")[1]),
        "nvmlDeviceGetComputeInstanceId": lambda gpu: int(gpu.old_uuid.split("/")[2]),
    }


def described(driver: GpuDriver, folder: Path, *, broken: str = "") -> str:
    """The value of `VARIABLE` for a rank's process on this host, which leaves a file in `folder` for its GPU."""
    return base64.b64encode(pickle.dumps((driver, str(folder), broken))).decode()


def install_from_environment() -> None:
    """Give a rank's process these GPUs. The CPU computes what the GPU would."""
    rank_main: Any = importlib.import_module("transom_worker.execution.ranks.rank_main")
    driver, folder, broken = pickle.loads(base64.b64decode(os.environ[VARIABLE]))
    install(driver, setattr, broken=broken)
    open_device, rendezvous, connect = model_loading.open_device, rank_main.Rendezvous, rank_main.connect

    def open_and_note(device: torch.device) -> None:
        open_device(torch.device("cuda"))
        Path(folder, model_loading.used_gpu()).write_text(os.environ["CUDA_VISIBLE_DEVICES"])

    replaced: dict[Any, dict[str, Any]] = {
        model_loading: {"open_device": open_and_note, "choose_device": lambda device: torch.device("cpu")},
        rank_main: {
            "Rendezvous": lambda hosts, *, device, ip: rendezvous(hosts, ip=ip),
            "connect": lambda address, *, device, **others: connect(address, **others),
        },
    }
    for module, functions in replaced.items():
        for name, function in functions.items():
            setattr(module, name, function)


if __name__ == "__main__":  # a rank's program
    from transom_worker.execution.ranks.rank_main import main

    install_from_environment()
    main()
