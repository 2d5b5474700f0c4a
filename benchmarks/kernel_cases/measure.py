"""Measures a case: correctness first, then equal bits in two runs, then time; a wrong kernel is not timed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from gpu_child import device_error, tell
from gpu_device import Ceilings
from gpu_timing import Timer
from kernel_cases.case import Case, Prepared, Tensors

WRITES_MUCH = 0.25  # of what a case moves


def measure(
    case: Case, device: torch.device, ceilings: Ceilings, timer: Timer, *, only_check: bool = False
) -> dict[str, Any]:
    """`status` is passed, missed (a target), wrong, or skipped; see docs/gpu.md for the other fields."""
    _free(device)
    try:
        prepared = case.prepare(device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"status": "skipped", "error": str(error)[:300]}
    result = _correct(case, prepared)
    if result["status"] != "wrong" and not only_check:
        result |= _timed(case, prepared, ceilings, timer)
        if prepared.rivals:
            tell(result)
            result |= _beside_rivals(case, prepared, timer, result)
    return result | _peak(device)


def _free(device: torch.device) -> None:
    """What the case before held, so that this one's memory is its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


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
        "status": "passed",
        "errors": errors,
        "error_limits": [check.limit for check in checks],
        "same_bits_twice": all(_same_bits(a, b) for a, b in zip(out, again, strict=True)),
    }
    if prepared.alone is not None:
        result["same_bits_alone"] = all(_same_bits(a, b) for a, b in prepared.alone())
    if any(check.error > check.limit for check in checks):
        return result | {"status": "wrong", "error": f"differs from the reference by {max(errors):.2g}"}
    if not result["same_bits_twice"]:
        return result | {"status": "wrong", "error": "two runs differ"}
    if case.is_invariant and not result.get("same_bits_alone", True):
        return result | {"status": "wrong", "error": "a sequence's result depends on the rest of its batch"}
    return result


def _run_anew(prepared: Prepared) -> Tensors:
    if prepared.reset is not None:
        prepared.reset()
    return tuple(part.clone() if prepared.reset is not None else part for part in prepared.run())


def _timed(case: Case, prepared: Prepared, ceilings: Ceilings, timer: Timer) -> dict[str, Any]:
    timing = timer.time(prepared.timed or prepared.run, captured=prepared.captured, writes=_writes_much(prepared))
    of_bandwidth = prepared.num_bytes / timing.seconds / ceilings.copy_bytes_per_s
    of_matrix = prepared.flops / timing.seconds / ceilings.matrix_flops_per_s
    result: dict[str, Any] = {
        "time_us": 1e6 * timing.seconds,
        "spread": timing.spread,
        "repeats": timing.repeats,
        "launch": timing.launch,
        "host_us": 1e6 * timing.host_s,
        "bytes": prepared.num_bytes,
        "flops": prepared.flops,
        "formula": case.formula,
        "share_of_bandwidth": of_bandwidth,
        "share_of_matrix_rate": of_matrix,
        "share_of_floor": ceilings.floor_s(prepared.num_bytes, prepared.flops) / timing.seconds,
        "rivals": {},
        "status": "passed",
    }
    if timing.launch == "cpu":
        return result  # the time of an interpreter is held against nothing
    if case.target is not None:
        reached = of_bandwidth if case.target.of == "bandwidth" else of_matrix
        result["target"] = {
            "least": case.target.least,
            "goal": case.target.goal,
            "of": case.target.of,
            "reached": reached,
        }
        if reached < case.target.least:
            result["status"] = "missed"
    return result


def _beside_rivals(case: Case, prepared: Prepared, timer: Timer, result: dict[str, Any]) -> dict[str, Any]:
    """What others take; `fatal` where one of them broke the device, which takes nothing from our own figures."""
    ours_s = result["time_us"] / 1e6
    rivals = {name: _rival(make, timer, ours_s) for name, make in prepared.rivals.items()}
    found: dict[str, Any] = {"rivals": rivals}
    if timer.is_spoilt or device_error() is not None:
        found["fatal"] = True
    behind = [name for name, least in case.rival_limits.items() if rivals.get(name, {}).get("speedup", least) < least]
    if behind and result["launch"] != "cpu":
        found |= {"status": "missed", "behind": behind}
    return found


def _writes_much(prepared: Prepared) -> bool:
    return sum(part.nbytes for part in prepared.run()) >= WRITES_MUCH * prepared.num_bytes


def _rival(make: Any, timer: Timer, ours_s: float) -> dict[str, Any]:
    """Another implementation on the same shapes; one that is absent or refuses says so."""
    try:
        timing = timer.time(make())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {
        "time_us": 1e6 * timing.seconds,
        "spread": timing.spread,
        "launch": timing.launch,
        "speedup": timing.seconds / ours_s,
    }


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
