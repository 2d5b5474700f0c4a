"""Measures a case: correctness first, then equal bits in two runs, then time; a wrong kernel is not timed."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.engine.kernel_cases.case import Case, Prepared, Tensors
from benchmarks.gpu.device import Ceilings
from benchmarks.gpu.timing import Timer

WRITES_MUCH = 0.25  # of what a case moves


def measure(case: Case, device: torch.device, ceilings: Ceilings | None, timer: Timer) -> dict[str, Any]:
    """`status` is passed, wrong, or skipped; docs/gpu.md has the other fields. Without ceilings nothing is timed."""
    prepared = _prepared(case, device)
    if isinstance(prepared, str):
        return {"status": "skipped", "error": prepared}
    result = _correct(case, prepared)
    if result["status"] == "passed" and ceilings is not None:
        result |= _timed(case, prepared, ceilings, timer)
    return result | _peak(device)


def measure_rival(case: Case, rival: str, device: torch.device, timer: Timer) -> dict[str, Any]:
    """The time of another implementation on the same shapes. One that is absent or refuses raises its own error."""
    prepared = _prepared(case, device)
    if isinstance(prepared, str):
        return {"status": "skipped", "error": prepared}
    timing = timer.time(prepared.rivals[rival]())
    return {"status": "passed", "time_us": 1e6 * timing.seconds, "spread": timing.spread, "launch": timing.launch}


def _prepared(case: Case, device: torch.device) -> Prepared | str:
    """The case on its device, in memory of its own; or why there is no room for it."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return case.prepare(device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return str(error)[:300]


def _peak(device: torch.device) -> dict[str, int]:
    return {"peak_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}


def _correct(case: Case, prepared: Prepared) -> dict[str, Any]:
    with _poisoned_memory():
        restore = prepared.traps() if prepared.traps else None
        out = _run_anew(prepared)
        checks = prepared.check(out)
        if restore is not None:
            restore()
        again = _run_anew(prepared)
    errors = [check.error for check in checks]
    result: dict[str, Any] = {
        "status": "wrong",
        "errors": errors,
        "error_limits": [check.limit for check in checks],
        "same_bits_twice": all(_same_bits(a, b) for a, b in zip(out, again, strict=True)),
    }
    if prepared.alone is not None:
        result["same_bits_alone"] = all(_same_bits(a, b) for a, b in prepared.alone())
    if any(check.error > check.limit for check in checks):
        return result | {"error": f"differs from the reference by {max(errors):.2g}"}
    if not result["same_bits_twice"]:
        return result | {"error": "two runs differ"}
    if case.is_invariant and not result.get("same_bits_alone", True):
        return result | {"error": "a sequence's result depends on the rest of its batch"}
    return result | {"status": "passed"}


def _run_anew(prepared: Prepared) -> Tensors:
    if prepared.reset is not None:
        prepared.reset()
    return tuple(part.clone() if prepared.reset is not None else part for part in prepared.run())


def _timed(case: Case, prepared: Prepared, ceilings: Ceilings, timer: Timer) -> dict[str, Any]:
    timing = timer.time(prepared.timed or prepared.run, captured=prepared.captured, writes=_writes_much(prepared))
    return {
        "time_us": 1e6 * timing.seconds,
        "spread": timing.spread,
        "repeats": timing.repeats,
        "launch": timing.launch,
        "host_us": 1e6 * timing.host_s,
        "bytes": prepared.num_bytes,
        "flops": prepared.flops,
        "formula": case.formula,
        # Of the ceilings; "floor" is the larger of the two times that they allow, over the time.
        "reached": {
            "bandwidth": prepared.num_bytes / timing.seconds / ceilings.copy_bytes_per_s,
            "matrix rate": prepared.flops / timing.seconds / ceilings.matrix_flops_per_s,
            "floor": ceilings.floor_s(prepared.num_bytes, prepared.flops) / timing.seconds,
        },
    }


def _writes_much(prepared: Prepared) -> bool:
    return sum(part.nbytes for part in prepared.run()) >= WRITES_MUCH * prepared.num_bytes


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN, or of the largest integer, so that elements that no kernel writes are detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
