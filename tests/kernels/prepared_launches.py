"""Launches one kernel in several ways over a driver that takes notes, and prints them as JSON; see `test_launching_triton`."""

import json
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from transom_kernels.absent_device import AbsentDriver
from transom_kernels.prepared_launch import PreparedLaunch

launches: list[dict[str, Any]] = []


class NotingLauncher:
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self._kernel = str(source.attrs)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
        _, _, _, *arguments = rest  # metadata of the launch, and its two hooks
        as_numbers = [part.data_ptr() if isinstance(part, torch.Tensor) else part for part in arguments]
        launches.append({"grid": [x, y, z], "arguments": as_numbers, "kernel": self._kernel})


@triton.jit(do_not_specialize=["count"])
def scale_rows(x, out, count, stride, factor, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    kept = n < count
    row = tl.program_id(0) * stride
    tl.store(out + row + n, tl.load(x + row + n, mask=kept) * factor, mask=kept)


def noted(launch: Callable[[], None]) -> dict[str, Any]:
    launches.clear()
    run = triton.runtime.JITFunction.run
    with patch.object(triton.runtime.JITFunction, "run", autospec=True, side_effect=run) as through_triton:
        launch()
    return launches[-1] | {"launches": len(launches), "binds": through_triton.call_count}


def main() -> None:
    with patch.object(AbsentDriver, "launcher_cls", NotingLauncher):
        driver.set_active(AbsentDriver((9, 0)))
        arguments = {"stride": 64, "factor": 2.0, "BLOCK": 64}
        prepared = PreparedLaunch(scale_rows, arguments, num_warps=4)
        x, out, others = torch.empty(3, 64), torch.empty(3, 64), torch.empty(2, 3, 64)
        grid = (3, 1, 1)
        told = {
            "first": noted(lambda: prepared(grid, (x, out), 64)),
            "again": noted(lambda: prepared(grid, (x, out), 64)),
            "other numbers": noted(lambda: prepared(grid, (others[0], others[1]), 5)),
            "addresses of others": [others[0].data_ptr(), others[1].data_ptr()],
            "other dtype": noted(lambda: prepared(grid, (x.half(), out), 64)),
            "unaligned": noted(lambda: prepared(grid, (x[0, 1:], out), 8)),
            "after unaligned": noted(lambda: prepared(grid, (x, out), 64)),
        }
        hook = knobs.runtime.launch_enter_hook
        hook.add(print_nothing)
        told["profiled"] = noted(lambda: prepared(grid, (x, out), 64))
        hook.remove(print_nothing)
        with patch.object(triton, "__version__", "4.0.0"):
            newer = PreparedLaunch(scale_rows, arguments, num_warps=4)
        newer(grid, (x, out), 64)
        told["unknown version"] = noted(lambda: newer(grid, (x, out), 64))
    print(json.dumps(told))


def print_nothing(metadata: Any) -> None:
    pass


if __name__ == "__main__":
    main()
