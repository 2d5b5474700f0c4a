"""Which cases of the kernels' benchmark are timed as CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_device import Ceilings
from gpu_timing import Timing, Work
from kernel_cases import cache_writes
from kernel_cases.case import Scale
from kernel_cases.measure import measure

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_bytes_per_s=1e9, matrix_flops_per_s=1e9)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


class TakesNote:
    """A timer that says what it was asked for."""

    is_spoilt = False

    def __init__(self) -> None:
        self.captured: bool | None = None

    def time(self, work: Work, *, captured: bool = True, writes: bool = False) -> Timing:
        self.captured = captured
        return Timing(seconds=1.0, spread=0.0, repeats=1, launch="cpu", host_s=1.0)


@pytest.mark.exhaustive
def test_what_reads_host_memory_at_every_run_is_no_graph() -> None:
    """A graph would copy the blocks' numbers from where they were when it was captured, freed memory by then. Loads wait."""
    seen: dict[str, bool | None] = {}
    for case in cache_writes.cases(Scale("tiny")):
        timer: Any = TakesNote()
        assert measure(case, CPU, CEILINGS, timer)["status"] == "passed"
        seen[case.name] = timer.captured
    assert {name for name, captured in seen.items() if not captured} == {
        "block copies 2",
        "host tier spills blocks of 256",
        "host tier loads blocks of 256",
    }
    assert len(seen) > 1
