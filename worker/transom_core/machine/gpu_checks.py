"""What keeps torch or Triton from computing on the host's GPUs: one line with what was found, what is needed and what to do."""

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from transom_core.machine.gpus import VISIBLE_DEVICES, GpuDriver, visible_gpus

LEAST_CAPABILITY = (8, 0)  # matrix products of bfloat16 numbers
COMPILERS = ("gcc", "clang")  # Triton builds its launcher, a small C library, with the first that it finds


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch: its version, and the version of CUDA that it is built for (None for a CPU build)."""

    version: str
    cuda: tuple[int, int] | None


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
    gpus = visible_gpus(driver, environment)
    if not gpus:
        return _why_no_gpu(driver, environment)
    if broken := [gpu for gpu in gpus if gpu.error]:
        return (
            f"{broken[0].name} cannot be used: {broken[0].error}. Repair it (nvidia-smi shows its state), leave it out of "
            f"{VISIBLE_DEVICES}, or serve on the CPU with --device cpu."
        )
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
            f"{VISIBLE_DEVICES}."
        )
    return _compiler_problem(environment, python_include or _python_include())


def too_few_gpus(needed: int, driver: GpuDriver, what: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Say that `what`, a setting, needs more GPUs than are visible here; None if there are enough."""
    num_gpus = len(visible_gpus(driver, environment))
    if needed <= num_gpus:
        return None
    visible, found = environment.get(VISIBLE_DEVICES), f"this machine has {num_gpus}"
    if visible is not None and driver.gpus:
        found = f"{VISIBLE_DEVICES} {visible!r} leaves {num_gpus} of this machine's {len(driver.gpus)}"
    return f"{what} needs {needed} GPUs and {found}; ask for fewer, or use --device cpu."


def _why_no_gpu(driver: GpuDriver, environment: Mapping[str, str]) -> str:
    if driver.error:
        return (
            f"The NVIDIA driver does not answer ({driver.error}). nvidia-smi must show the GPUs: after an update of the driver "
            "restart this machine; --device cpu serves on the CPU."
        )
    if not driver.version:
        return "This machine has no NVIDIA driver; install one, or serve on the CPU with --device cpu."
    visible = environment.get(VISIBLE_DEVICES)
    if driver.gpus and visible is not None:
        return (
            f"{VISIBLE_DEVICES} is {visible!r}, which leaves none of this machine's {len(driver.gpus)} GPUs; unset it, give "
            "indices or UUIDs, each once, or serve on the CPU with --device cpu."
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
