"""Benchmarks every kernel: correctness against a float64 reference, equal bits in two runs, and time relative to the device's
limits.

    python benchmarks/kernels.py [--quick] [--only WORDS] [--check] [--budget-s 420] [--out FOLDER]
    python benchmarks/kernels.py --device cpu --tiny       the harness itself, through Triton's interpreter

Cases run in a child process, which is replaced when one ends it or hangs. Writes kernels.json and kernels.md; docs/gpu.md says what
each figure means. Exits with 1 where a kernel is wrong or broke, not where a target was missed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpu_jobs import Script, arguments_of, run_script
from gpu_results import Report, markdown, tally
from gpu_targets import FLATNESS, kernel_targets

if TYPE_CHECKING:
    from kernel_cases.case import Case

CEILINGS = "ceilings"  # the first job


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    script = Script(
        name="kernels", path=__file__, first=CEILINGS, jobs=lambda options: list(all_cases(options)), answer=_answer,
        line=_line, report=_report, job_s=110.0, budget_s=420.0,
    )  # fmt: skip
    parser = arguments_of(script, __doc__)
    parser.add_argument("--quick", action="store_true", help="a few sizes of each operator")
    parser.add_argument("--check", action="store_true", help="correctness alone, no times")
    options = parser.parse_args(given)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    return run_script(script, options, given)


def all_cases(options: argparse.Namespace) -> dict[str, Case]:
    """The cases of all operators by name, at the scale that the options say."""
    from kernel_cases import (
        attention,
        cache_writes,
        experts,
        hyper_connections,
        latent,
        policies,
        routers,
        rows,
        sampling,
    )
    from kernel_cases.case import Scale

    scale = Scale("tiny" if options.tiny else "quick" if options.quick else "full")
    parts = (attention, policies, rows, cache_writes, sampling, experts, routers, latent, hyper_connections)
    return {case.name: case for part in parts for case in part.cases(scale)}


def _answer(options: argparse.Namespace, job: str) -> dict[str, Any]:
    import torch

    from gpu_device import clocks, describe
    from kernel_cases.measure import measure

    device = torch.device(options.device)
    torch.manual_seed(0)
    ceilings, timer, cases = _session(options.device, options.tiny or options.check, _key(options))
    if job == CEILINGS:
        return {"status": "passed", "ceilings": ceilings.as_json(), "about": describe(device), "clocks": clocks(device)}
    result = measure(cases[job], device, ceilings, timer, only_check=options.check) | {"clocks": clocks(device)}
    return result | {"fatal": True} if timer.is_spoilt else result


def _key(options: argparse.Namespace) -> tuple[bool, bool]:
    return options.quick, options.tiny


@functools.lru_cache(maxsize=1)
def _session(device_name: str, tiny: bool, key: tuple[bool, bool]) -> tuple[Any, Any, dict[str, Case]]:
    """What a child process finds out once: it measures the ceilings again where it replaces another."""
    import torch

    from gpu_device import measure_ceilings
    from gpu_timing import Timer

    device, (quick, is_tiny) = torch.device(device_name), key
    cases = all_cases(argparse.Namespace(quick=quick, tiny=is_tiny))
    return measure_ceilings(device, tiny=tiny), Timer(device), cases


def _report(options: argparse.Namespace, first: dict[str, Any], results: list[dict[str, Any]]) -> Report:
    _compare_lengths(results, all_cases(options))
    targets = () if options.check or options.device == "cpu" else kernel_targets(results)
    return Report(results=results, table=_table(first, results), targets=targets)


def _compare_lengths(results: list[dict[str, Any]], cases: dict[str, Case]) -> None:
    """A window's time must not depend on what lies before the window."""
    times = {result["job"]: result.get("time_us") for result in results}
    for result in results:
        short = cases[result["job"]].flat_with if result["job"] in cases else None
        ours, theirs = times[result["job"]], times.get(short or "")
        if ours and theirs:
            result["over_short_context"] = ours / theirs
            if ours > FLATNESS * theirs and result["status"] == "passed" and result.get("launch") != "cpu":
                result |= {"status": "missed", "error": f"{ours / theirs:.2f} times as long as {short}"}


def _line(result: dict[str, Any]) -> str:
    if "time_us" in result:
        return f"{result['status']:8} {result['job']:48} {result['time_us']:10.1f} us  {result['share_of_floor']:.2f} of the floor"
    return f"{result['status']:8} {result['job']:48} {str(result.get('error', ''))[:100]}"


def _table(first: dict[str, Any], results: list[dict[str, Any]]) -> str:
    ceilings = first.get("ceilings") or {}
    head = (
        f"Copies {ceilings.get('copy_bytes_per_s', 0) / 1e9:,.0f} GB/s, bf16 products "
        f"{ceilings.get('matrix_flops_per_s', 0) / 1e12:,.1f} TFLOP/s. {tally(results)}."
    )
    columns = (
        "case", "status", "us", "spread %", "launch", "host us", "of bandwidth", "of matrix rate", "of the floor", "target",
        "rivals (their time over ours)", "error",
    )  # fmt: skip
    return head + "\n\n" + markdown(columns, [_row(result) for result in results])


def _row(result: dict[str, Any]) -> list[object]:
    target, rivals = result.get("target"), result.get("rivals") or {}
    said = "; ".join(
        f"{name} {rival['speedup']:.2f}" if "speedup" in rival else f"{name}: none" for name, rival in rivals.items()
    )
    return [
        result["job"], result["status"], result.get("time_us"),
        100 * result["spread"] if "spread" in result else None, result.get("launch"), result.get("host_us"),
        result.get("share_of_bandwidth"), result.get("share_of_matrix_rate"), result.get("share_of_floor"),
        f"{target['reached']:.2f} of {target['least']:.2f} {target['of']}" if target else None,
        said, str(result.get("error", ""))[:120],
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
