"""The GPU kernels of which a speed was promised: correctness, equal bits in two runs, and time relative to the device's limits.

    python -m benchmarks.engine.kernels [--quick] [--only WORDS] [--check] [--budget-s 420] [--out FOLDER]
    python -m benchmarks.engine.kernels --device cpu --tiny       the harness itself, through Triton's interpreter

Cases run in a child process (`gpu.jobs`), rivals after them as jobs of their own, so that one that crashes costs its own figure
alone. Writes kernels.json; docs/gpu.md says what each figure means, and that there is none of a GPU yet. Exits with 1 where a
kernel is wrong or broke, not where a promise was missed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.jobs import ABOUT, Part, Result, arguments_of, promise_rows, run_part

if TYPE_CHECKING:
    from benchmarks.engine.kernel_cases.case import Case
    from benchmarks.gpu.timing import Timer

BESIDE = " beside "  # a rival's job: the case's name, this, the rival's


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = arguments_of(PART, __doc__)
    parser.add_argument("--check", action="store_true", help="correctness alone, no times")
    options = parser.parse_args(given)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    return run_part(PART, options, given)


def all_cases(options: argparse.Namespace) -> dict[str, Case]:
    """The cases of all operators by name, at the scale that the options say."""
    # Triton reads TRITON_INTERPRET when it is imported.
    from benchmarks.engine.kernel_cases import attention, cache_writes, experts, rows, sampling
    from benchmarks.engine.kernel_cases.case import Scale

    scale = Scale("tiny" if options.tiny else "quick" if options.quick else "full")
    parts = (attention, rows, cache_writes, sampling, experts)
    return {case.name: case for part in parts for case in part.cases(scale)}


def jobs(options: argparse.Namespace) -> list[str]:
    """All cases, and unless they are only checked, the rivals of each."""
    cases = all_cases(options)
    rivals = [f"{name}{BESIDE}{rival}" for name, case in cases.items() for rival in case.rivals]
    return [*cases, *([] if options.check else rivals)]


def answer(options: argparse.Namespace, job: str, about: Result) -> Result:
    """One case, or one rival of one."""
    import torch

    from benchmarks.engine.kernel_cases.measure import measure, measure_rival
    from benchmarks.gpu.device import Ceilings, clocks, describe, measure_ceilings

    device = torch.device(options.device)
    torch.manual_seed(0)
    if job == ABOUT:
        ceilings = measure_ceilings(device, tiny=options.tiny or options.check)
        return {"status": "passed", **describe(device), "ceilings": asdict(ceilings)}
    name, _, rival = job.partition(BESIDE)
    case, timer = all_cases(options)[name], _timer(options.device)
    if rival:
        result = measure_rival(case, rival, device, timer)
    else:
        result = measure(case, device, None if options.check else Ceilings(**about["ceilings"]), timer)
        result["flat_with"] = case.flat_with
        if result.get("launch") != "cpu":  # the time of an interpreter is held against nothing
            result["promises"] = {promise.name: [promise.of, promise.least] for promise in case.promises}
    return result | {"clocks": clocks(device)} | ({"fatal": True} if timer.is_spoilt else {})


@functools.lru_cache(maxsize=1)
def _timer(device_name: str) -> Timer:
    """One for all jobs of a child: it holds half a GiB."""
    import torch

    from benchmarks.gpu.timing import Timer

    return Timer(torch.device(device_name))


def report(results: Sequence[Result]) -> list[Result]:
    """Rows about promises. Puts into each case's `reached` its rivals' times over ours, and a window's short context's time."""
    times: dict[str, Any] = {result["job"]: result.get("time_us") for result in results}
    for result in results:
        name, _, rival = result["job"].partition(BESIDE)
        own = next((one for one in results if one["job"] == name and "reached" in one), None)
        if rival and own is not None and "time_us" in result:
            own["reached"][rival] = result["time_us"] / own["time_us"]
        short = times.get(str(result.get("flat_with")))
        if "reached" in result and short:
            result["reached"]["short context"] = short / result["time_us"]
    return promise_rows(results)


def figure(result: Result) -> str:
    """What a line of output says of a job."""
    if "time_us" not in result:
        return ""
    share = f"  {result['reached']['floor']:.2f} of the floor" if "reached" in result else ""
    return f"{result['time_us']:10.1f} us{share}"


PART = Part(
    name="kernels", module="benchmarks.engine.kernels", jobs=jobs, answer=answer, figure=figure, report=report,
    job_s=110.0, budget_s=420.0, counts=lambda job: BESIDE not in job,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
