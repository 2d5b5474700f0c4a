"""The host's NVIDIA GPUs as its driver reports them (NVML), and which of them CUDA_VISIBLE_DEVICES leaves to a process.

Nothing here imports torch, so that `transom serve` refuses a machine within a second, before Ray starts.

    visible       a GPU that this process may use: CUDA_VISIBLE_DEVICES names it, or is not set
    part          of a GPU that is divided (MIG): a device with a UUID, memory and multiprocessors of its own
    capability    the generation of a GPU, such as (9, 0) for an H100; kernels are compiled for it

GPUs are counted as `nvidia-smi` counts them, by PCI bus. CUDA would put the fastest one first: `DEVICE_ORDER` tells it not to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # a variable, and its value; set before CUDA starts in a process


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one part of a divided GPU. `error` says why the driver cannot use it, such as "GPU is lost"; empty if it can."""

    name: str
    uuid: str
    memory_bytes: int  # 0 if the driver does not say, as where GPU and host share their memory
    capability: tuple[int, int]
    error: str = ""
    parts: tuple[Gpu, ...] = ()
    # Of a part, as drivers before 470 name it: MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>.
    old_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    """The host's driver: its version, the newest CUDA that it can run, such as (12, 8), and all GPUs of the host. `error` says why
    it does not answer, such as "Driver/library version mismatch"."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]
    error: str = ""


NO_DRIVER = GpuDriver(version="", cuda=(0, 0), gpus=())


def read_driver() -> GpuDriver:
    """Ask the driver for its version and its GPUs; return `NO_DRIVER` if the host has none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return NO_DRIVER
    except pynvml.NVMLError as error:
        return replace(NO_DRIVER, error=str(error))
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return GpuDriver(
            version=pynvml.nvmlSystemGetDriverVersion(),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())),
        )
    except pynvml.NVMLError as error:
        return replace(NO_DRIVER, error=str(error))
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
        gpu = _read_device(nvml, handle, capability)
        if not _is_divided(nvml, handle):
            return gpu
        parts = tuple(_read_parts(nvml, handle, gpu))
        return replace(gpu, parts=parts, error="" if parts else "it is divided (MIG) and has no part")
    except nvml.NVMLError as error:
        return Gpu(name=f"GPU {index}", uuid="", memory_bytes=0, capability=(0, 0), error=str(error))


def _read_device(nvml: Any, handle: Any, capability: tuple[int, int]) -> Gpu:
    memory_bytes = 0
    with suppress(nvml.NVMLError_NotSupported):
        memory_bytes = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        memory_bytes=memory_bytes,
        capability=capability,
    )


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return False


def _read_parts(nvml: Any, handle: Any, gpu: Gpu) -> Iterable[Gpu]:
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError:  # an empty slot, or one of another container
            continue
        instances = f"{nvml.nvmlDeviceGetGpuInstanceId(part)}/{nvml.nvmlDeviceGetComputeInstanceId(part)}"
        yield replace(_read_device(nvml, part, gpu.capability), old_uuid=f"MIG-{gpu.uuid}/{instances}")


def visible_devices(gpus: Sequence[Gpu], visible: str | None) -> dict[str, Gpu]:
    """Return the devices that CUDA_VISIBLE_DEVICES, whose value is `visible`, names, in its order: how it names each -> the GPU.

    CUDA reads the list up to the first entry that names no GPU: "" and "-1" leave none, "1,-1,0" leaves GPU 1. All entries are
    indices, or UUIDs of GPUs, or UUIDs of parts; the beginning of a UUID is enough if no other begins so. A list that names a
    device twice leaves none. Of a divided GPU that is named as a whole CUDA takes the first part.

    One process can use only the first part of a list, but each rank or worker gets an entry of its own, so all count.
    """
    entries = map(str, range(len(gpus))) if visible is None else (entry.strip() for entry in visible.split(","))
    found: dict[str, Gpu] = {}
    kind = None
    for entry in entries:
        gpu = _named(gpus, entry)
        if gpu is None or _kind(entry) != (kind := kind or _kind(entry)):
            break
        if gpu in found.values():
            return {}
        found[entry] = gpu
    return found


def _kind(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "index"


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if _kind(entry) == "index":
        number = re.match(r"\+?(\d+)", entry)  # CUDA ignores what follows the digits
        whole = list(gpus[int(number[1]) :][:1]) if number else []
    elif entry.startswith("GPU-"):
        whole = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        whole = [part for gpu in gpus for part in gpu.parts if entry == part.old_uuid or part.uuid.startswith(entry)]
    if len(whole) != 1:
        return None
    return whole[0].parts[0] if whole[0].parts else whole[0]


def visible_gpus(driver: GpuDriver, environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the GPUs that the environment leaves to this process and to those that it starts."""
    return tuple(visible_devices(driver.gpus, environment.get(VISIBLE_DEVICES)).values())


def expects_gpu(driver: GpuDriver, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `--device auto` means a GPU: the host has some, and CUDA_VISIBLE_DEVICES does not hide all on purpose.

    It hides them if it is empty, negative or "NoDevFiles". A driver that does not answer, or a list whose entries are wrong, is a
    mistake: the CPU would then compute without anybody having asked for it.
    """
    visible = environment.get(VISIBLE_DEVICES)
    hides = visible is not None and (visible.strip() in ("", "NoDevFiles") or visible.strip().startswith("-"))
    return not hides and bool(driver.gpus or driver.error)
