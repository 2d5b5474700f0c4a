"""A device: its name and versions for the record, its clocks, and the two ceilings that figures are shares of."""

import datetime
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.gpu.timing import Timer
from transom_core.machine.gpus import read_driver

PACKAGES = ("torch", "triton", "transformers", "numpy")
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
    """Date, chip, driver and versions."""
    is_cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": str(torch.cuda.get_device_properties(device)) if is_cuda else platform.machine(),
        "driver": read_driver().version,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
    }


def clocks(device: torch.device) -> dict[str, float]:
    """Clock, power and temperature, taken right after the work: a hot or capped card measures less. Empty where none is known."""
    if device.type != "cuda":
        return {}
    try:
        return {
            "sm_mhz": torch.cuda.clock_rate(device),
            "power_w": torch.cuda.power_draw(device) / 1e3,
            "celsius": torch.cuda.temperature(device),
        }
    except (
        Exception
    ):  # without pynvml, or of a driver that does not tell: clocks are a remark, never a reason to lose a figure
        return {}
