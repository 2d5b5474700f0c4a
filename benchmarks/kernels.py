"""Every kernel: correct against a reference in float64, the same bits twice, then its time against what the device can do.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_jobs import answer_or_error, run_jobs, serve
from gpu_results import is_sound, markdown, tally, write

if TYPE_CHECKING:
    from kernel_cases.case import Case

CASE_S = 75.0  # of one case, its compilation included
LOCAL = Path(__file__).parent / "results" / "local"
CEILINGS = "ceilings"  # the first job
FLATNESS = 1.10  # a window's time at a long context over that at a short one, at most


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    if options.child:
        serve(functools.partial(_answer, options))
        return 0
    names = _chosen(options)
    if options.list:
        print("\n".join(names))
        return 0
    jobs = [CEILINGS, *names]
    if options.in_process:
        found = [{"job": job, **answer_or_error(functools.partial(_answer, options), job)} for job in jobs]
    else:
        command = [sys.executable, __file__, *given, "--child"]
        found = []
        for result in run_jobs(command, jobs, budget_s=options.budget_s, job_s=CASE_S):
            found.append(result)
            print(_line(result), flush=True)
    return _report(options, found)


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a few sizes of each operator")
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter")
    parser.add_argument("--check", action="store_true", help="correctness alone, no times")
    parser.add_argument("--only", default="", help="cases whose name holds all of these words")
    parser.add_argument("--budget-s", type=float, default=420.0, help="cases that it does not reach are skipped")
    parser.add_argument("--out", type=Path, default=LOCAL)
    parser.add_argument("--list", action="store_true", help="names of the cases")
    parser.add_argument("--in-process", action="store_true", help="no child process; for debuggers and sanitizers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _all_cases(options: argparse.Namespace) -> dict[str, Case]:
    from kernel_cases import attention, cache_writes, experts, latent, rows, sampling
    from kernel_cases.case import Scale

    scale = Scale("tiny" if options.tiny else "quick" if options.quick else "full")
    parts = (attention, rows, cache_writes, sampling, experts, latent)
    return {case.name: case for part in parts for case in part.cases(scale)}


def _chosen(options: argparse.Namespace) -> list[str]:
    words = options.only.split()
    return [name for name in _all_cases(options) if all(word in name for word in words)]


def _answer(options: argparse.Namespace, job: str) -> dict[str, Any]:
    import torch

    from gpu_device import clocks, describe
    from kernel_cases.measure import measure

    device = torch.device(options.device)
    torch.manual_seed(0)
    ceilings, timer, cases = _session(options.device, options.tiny or options.check, _key(options))
    if job == CEILINGS:
        return {"status": "passed", "ceilings": ceilings.as_json(), "about": describe(device), "clocks": clocks(device)}
    return measure(cases[job], device, ceilings, timer, only_check=options.check) | {"clocks": clocks(device)}


def _key(options: argparse.Namespace) -> tuple[bool, bool]:
    return options.quick, options.tiny


@functools.lru_cache(maxsize=1)
def _session(device_name: str, tiny: bool, key: tuple[bool, bool]) -> tuple[Any, Any, dict[str, Case]]:
    """What a child process finds out once: it measures the ceilings again where it replaces another."""
    import torch

    from gpu_device import measure_ceilings
    from gpu_timing import Timer

    device, (quick, is_tiny) = torch.device(device_name), key
    cases = _all_cases(argparse.Namespace(quick=quick, tiny=is_tiny))
    return measure_ceilings(device, tiny=tiny), Timer(device), cases


def _report(options: argparse.Namespace, found: list[dict[str, Any]]) -> int:
    first, results = found[0], found[1:]
    _compare_lengths(results, _all_cases(options))
    about = first.get("about", {}) | {
        name: first.get(name) for name in ("ceilings", "clocks", "error") if name in first
    }
    path = write(options.out, "kernels", about=about, results=results, table=_table(first, results))
    print(f"{tally(results)}; {path}")
    return 0 if is_sound(found) else 1


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
