"""The host's NVIDIA GPUs as its driver reports them (NVML), and what keeps torch or Triton from computing on them.

Nothing here imports torch, so that `transom serve` refuses a machine within a second, before Ray starts.

    visible       a GPU that this process may use: CUDA_VISIBLE_DEVICES names it, or is not set
    capability    the generation of a GPU, such as (9, 0) for an H100; kernels are compiled for it
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LEAST_CAPABILITY = (8, 0)  # matrix products of bfloat16 numbers
COMPILERS = ("gcc", "clang")  # Triton builds its launcher, a small C library, with the first that it finds


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    """The host's driver: its version, the newest CUDA that it can run, such as (12, 8), and all GPUs of the host."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch: its version, and the version of CUDA that it is built for (None for a CPU build)."""

    version: str
    cuda: tuple[int, int] | None


NO_DRIVER = GpuDriver(version="", cuda=(0, 0), gpus=())


def read_driver() -> GpuDriver:
    """Ask the driver for its version and its GPUs; return `NO_DRIVER` if the host has none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return NO_DRIVER
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return GpuDriver(
            version=pynvml.nvmlSystemGetDriverVersion(),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(_read_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())),
        )
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        capability=(major, minor),
    )


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES, whose value is `visible`, leaves to a process, in its order.

    CUDA reads the list up to the first entry that names no GPU: "" and "-1" leave none, "1,-1,0" leaves GPU 1. An entry is an
    index, the UUID of a GPU (or its beginning), or that of a part of a GPU (MIG), which counts as a GPU of its own.
    """
    if visible is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named(gpus, entry.strip())
        if gpu is None:
            break
        found.append(gpu)
    return tuple(found)


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        return gpus[0] if gpus else None  # the id does not name the GPU; all are taken to be of one generation
    return next((gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)), None)


def num_visible_gpus() -> int:
    """Return how many of this host's GPUs this process may use."""
    return len(visible_gpus(read_driver().gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))


def torch_build() -> TorchBuild:
    """Read the version of the installed torch from its files, without importing it."""
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    text = (folder / "version.py").read_text()
    version = re.search(r"^__version__ *= *['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return TorchBuild(
        version="unknown" if version is None else version[1],
        cuda=None if cuda is None else (int(cuda[1]), int(cuda[2])),
    )


def gpu_problem(
    driver: GpuDriver, torch: TorchBuild, environment: Mapping[str, str], *, python_include: str | None = None
) -> str | None:
    """Say why torch or Triton cannot compute on the visible GPUs of this host, and what to change; None if they can.

    `python_include` is the folder of Python.h; the running Python's if None.
    """
    gpus = visible_gpus(driver.gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return _why_no_gpu(driver, environment)
    if torch.cuda is None:
        return (
            f"This machine has {len(gpus)} GPUs ({gpus[0].name}), and torch {torch.version} is a build for CPUs. Install torch "
            "with CUDA (make setup without TORCH_INDEX), or serve on the CPU with --device cpu."
        )
    if driver.cuda[0] < torch.cuda[0]:
        return (
            f"The driver {driver.version} runs CUDA up to {_dotted(driver.cuda)}, and torch {torch.version} is built for CUDA "
            f"{_dotted(torch.cuda)}. Update the driver, or install a torch for CUDA {driver.cuda[0]} (TORCH_INDEX); --device cpu "
            "serves on the CPU."
        )
    old = [gpu for gpu in gpus if gpu.capability < LEAST_CAPABILITY]
    if old:
        return (
            f"{old[0].name} has compute capability {_dotted(old[0].capability)}; Transom's kernels need "
            f"{_dotted(LEAST_CAPABILITY)} or newer (A100, L4, RTX 30 and later). Use --device cpu, or leave it out of "
            "CUDA_VISIBLE_DEVICES."
        )
    return _compiler_problem(environment, python_include or _python_include())


def _why_no_gpu(driver: GpuDriver, environment: Mapping[str, str]) -> str:
    if not driver.version:
        return "This machine has no NVIDIA driver; install one, or serve on the CPU with --device cpu."
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if driver.gpus and visible is not None:
        return (
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which leaves none of this machine's {len(driver.gpus)} GPUs; unset it, give "
            "indices or UUIDs, or serve on the CPU with --device cpu."
        )
    return f"The NVIDIA driver {driver.version} finds no GPU; serve on the CPU with --device cpu."


def _compiler_problem(environment: Mapping[str, str], python_include: str) -> str | None:
    """Say what Triton lacks to build its launcher: a C compiler (the variable CC names one before COMPILERS) or Python's
    headers."""
    path = environment.get("PATH", "")
    names = (environment["CC"],) if environment.get("CC") else COMPILERS
    if not any(shutil.which(name, path=path) for name in names):
        return (
            f"Triton needs a C compiler on GPUs, and there is no {' or '.join(names)} on PATH. Install one (Debian and Ubuntu: "
            "apt-get install gcc libc6-dev)."
        )
    if not (Path(python_include) / "Python.h").exists():
        return (
            f"Triton needs Python's headers on GPUs, and {python_include} has no Python.h. Install them (Debian and Ubuntu: "
            "apt-get install python3-dev)."
        )
    return None


def _python_include() -> str:
    scheme = sysconfig.get_default_scheme()
    # As Triton does on Debian.
    return sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
