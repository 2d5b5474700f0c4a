"""A device: its name and versions for the record, its clocks, and the two ceilings that figures are shares of."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gpu_timing import Timer

PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "flash-attn")
COPIED_BYTES = (1 << 30, 4 << 30)
MATRIX_SIZES = (8192, 4096)
TINY_BYTES, TINY_SIZE = 1 << 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The best of a few sizes: a device-to-device copy, bytes read and written counted, and a bf16 product of random matrices."""

    copy_bytes_per_s: float
    matrix_flops_per_s: float

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """No version of work that moves and computes so much runs much faster."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matrix_flops_per_s)

    def as_json(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)


def measure_ceilings(device: torch.device, *, tiny: bool = False) -> Ceilings:
    """A second or two on a GPU. Random numbers: products of zeros draw less power and run faster than real ones."""
    timer = Timer(device, seconds=0.4)
    copies = [_copy_rate(timer, size, device) for size in ((TINY_BYTES,) if tiny else COPIED_BYTES)]
    products = [_matrix_rate(timer, size, device) for size in ((TINY_SIZE,) if tiny else MATRIX_SIZES)]
    return Ceilings(copy_bytes_per_s=max(copies), matrix_flops_per_s=max(products))


def _copy_rate(timer: Timer, num_bytes: int, device: torch.device) -> float:
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer.time(lambda: target.copy_(source), captured=False, writes=True).seconds


def _matrix_rate(timer: Timer, size: int, device: torch.device) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / timer.time(lambda: torch.mm(a, b, out=out), captured=False).seconds


def describe(device: torch.device) -> dict[str, Any]:
    """Date, chip, driver, versions and commit: what every file of results begins with."""
    commit = _said("git", "rev-parse", "--short", "HEAD")
    has_git = bool(commit) and "TRANSOM_COMMIT" not in os.environ
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("TRANSOM_COMMIT") or commit,
        "changed_since_commit": bool(_said("git", "status", "--porcelain", "--untracked-files=no"))
        if has_git
        else None,
        "device": _chip(device),
        "driver": _smi("driver_version"),
        "python": sys.version.split()[0],
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def clocks(device: torch.device) -> dict[str, float]:
    """Clocks, power and temperature as the driver says, taken right after the work: a hot or capped card measures less. Empty where
    its library is not installed; asking the driver's program instead would take longer than a case."""
    if device.type != "cuda":
        return {}
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        reasons = getattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # older ones say Throttle for Event
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(card) / 1e3,
            "celsius": pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": (reasons or pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)(card),
        }
    except Exception:  # absent, or a driver that does not tell: clocks are a remark, never a reason to lose a figure
        return {}


def _chip(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "kind": device.type}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "kind": "cuda",
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": getattr(found, "L2_cache_size", None),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _smi(field: str) -> str:
    return _said("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "-i", "0")


def _said(*command: str) -> str:
    """What a command prints; nothing where it is absent or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
