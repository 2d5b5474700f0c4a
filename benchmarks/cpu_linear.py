"""Linear layers on CPUs: the kernels of `transom_kernels.linear` against torch, and against reading the same memory.

    python benchmarks/cpu_linear.py
    python benchmarks/cpu_linear.py --dtype float32 --rows 1,512 --shapes 576x576

Every shape has as many weights as fill `--mib`, which are used in turn, so that they come from memory as in a decode step. The
candidates take turns for several rounds in one process; a figure is the median of its rounds, and a ratio the median of the rounds'
ratios to `own`. With `--threads 1` times are CPU time, which busy neighbours hardly change.

- own: the kernels. torch: F.linear. onednn: torch's private operator over weights that it packed.
- read: a sum over the weights' memory.

Shapes are K x N; `gated` has gate and up of N together, and the activation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.pop("OMP_WAIT_POLICY", None)

import torch
import torch.nn.functional as F

from transom_kernels.cpu.threads import set_num_threads
from transom_kernels.linear import PackedWeight, gated_linear, linear, pack_weight

DEMO = "576x960,576x576,576x3072gated,1536x576,576x49152"
LARGE = "4096x4096,4096x14336"
PAUSE_S = 0.01  # in which the threads of the candidate before stop spinning

Call = Callable[[], object]


@dataclass(slots=True)
class Shape:
    """A weight's shape, and how often it is needed to fill the memory."""

    width: int
    outputs: int
    gated: bool
    copies: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.width} x {self.outputs}{' gated' if self.gated else ''}"


def parse_shape(text: str, mib: int, itemsize: int) -> Shape:
    """One shape of the command line."""
    width, outputs = (int(part) for part in text.removesuffix("gated").split("x"))
    copies = max(1, (mib << 20) // (width * outputs * itemsize))
    return Shape(width, outputs, text.endswith("gated"), copies)


def candidates(shape: Shape, dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor, int], object]]:
    """By name: a function of x and the number of the weight."""
    plain = [(torch.randn(shape.outputs, shape.width) / 32).to(dtype) for _ in range(shape.copies)]
    half = shape.outputs // 2
    packed = [pack_weight(w[:half], up=w[half:]) if shape.gated else pack_weight(w) for w in plain]

    def own(x: torch.Tensor, index: int) -> object:
        return gated_linear(x, packed[index], "silu") if shape.gated else linear(x, packed[index])

    def by_torch(x: torch.Tensor, index: int) -> object:
        y = F.linear(x, plain[index])
        return F.silu(y[:, :half]) * y[:, half:] if shape.gated else y

    found: dict[str, Callable[[torch.Tensor, int], object]] = {"own": own, "torch": by_torch}
    if dtype == torch.bfloat16:
        with contextlib.suppress(AttributeError, RuntimeError):  # not in this torch, or not on this processor
            found["onednn"] = onednn(plain, gated=shape.gated)
    found["read"] = lambda x, index: _read(packed[index])
    return found


def onednn(plain: list[torch.Tensor], *, gated: bool) -> Callable[[torch.Tensor, int], object]:
    """Torch's private operator over packed weights."""
    pack, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    halves = [w.chunk(2) if gated else (w,) for w in plain]
    packed = [[pack(part.contiguous(), 32) for part in parts] for parts in halves]

    def run(x: torch.Tensor, index: int) -> object:
        parts = packed[index]
        if not gated:
            return multiply(x, parts[0], None, "none", [], "")
        return multiply.binary(x, multiply(x, parts[0], None, "swish", [], ""), parts[1], None, "mul")

    return run


def _read(weight: PackedWeight) -> object:
    return weight.panels.view(torch.int64).sum()


def measure(shape: Shape, dtype: torch.dtype, rows: list[int], rounds: int) -> None:
    """Print a line for each number of rows."""
    found = candidates(shape, dtype)
    for num_rows in rows:
        x = torch.randn(num_rows, shape.width).to(dtype)
        times: dict[str, list[float]] = {name: [] for name in found}
        once_s = one_pass(found["own"], x, shape, 1)
        repeats = max(1, min(20, round(0.03 / once_s)))
        for _ in range(rounds):
            for name, call in found.items():
                times[name].append(one_pass(call, x, shape, repeats))
        num_bytes = shape.width * shape.outputs * dtype.itemsize * shape.copies
        parts = []
        for name, own_times in times.items():
            median = statistics.median(own_times)
            ratio = statistics.median(t / o for t, o in zip(own_times, times["own"], strict=True))
            parts.append(
                f"{name} {num_bytes / median / 1e9:6.1f} GB/s {median / shape.copies * 1e6:8.0f} us {ratio:5.2f}"
            )
        print(f"{shape.name:18s} M {num_rows:4d} | " + " | ".join(parts), flush=True)


def one_pass(call: Callable[[torch.Tensor, int], object], x: torch.Tensor, shape: Shape, repeats: int) -> float:
    """Seconds of one pass over all copies."""
    time.sleep(PAUSE_S)
    call(x, 0)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for _ in range(repeats):
        for index in range(shape.copies):
            call(x, index)
    return (clock() - begin) / repeats


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8,32,128,512")
    parser.add_argument("--shapes", default=f"{DEMO},{LARGE}")
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    rows = [int(part) for part in arguments.rows.split(",")]
    with torch.inference_mode():
        for text in arguments.shapes.split(","):
            measure(parse_shape(text, arguments.mib, dtype.itemsize), dtype, rows, arguments.rounds)


if __name__ == "__main__":
    main()
