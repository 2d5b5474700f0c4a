"""The jobs of a part of the GPU's benchmarks, in child processes: one wrong kernel costs its own figures alone.

A part (`engine.kernels`, `gpu.families`, `gpu.models`) is a module with a `Part` that it runs as a program: names of jobs, and a
function that answers one of them in a child. The parent asks, prints, and writes OUT/NAME.json after every answer:

    about = child.answer("about")                 # the device, its versions and ceilings: goes to every other job
    for job in jobs: child.answer(job, about)     # a child that ends, hangs or loses its device is replaced

A run that was ended goes on: jobs that have passed in OUT/NAME.json, over the same sources and with the same options, are not
asked again (`--again` asks them). Jobs that the budget does not reach are `skipped`.
"""

import argparse
import hashlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.json_child import ROOT, Child, ChildEnded, ChildError, ChildTimeout, answer_calls, commit

Result = dict[str, Any]  # "job", "status", and what the part measured

ABOUT = "about"  # the first job
BROKEN = ("wrong", "crashed", "failed", "timed out")
STATUSES = (*BROKEN, "skipped", "passed")
LOCAL = ROOT / "benchmarks" / "results" / "local"
START_S = 90.0  # for the imports of a child, on top of its first job
LAST_LINES = 12
# What an error says after which every later call of the process fails.
FATAL = (
    "illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure", "CUDA error",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the benchmarks: what it asks for, and how that is answered, told and summed up."""

    name: str  # of its results
    module: str
    jobs: Callable[[argparse.Namespace], list[str]]  # but the first
    answer: Callable[[argparse.Namespace, str, Result], Result]  # of a job, beside the first job's result
    job_s: float  # the most that one may take
    budget_s: float
    figure: Callable[[Result], str] = lambda result: ""  # of a job that has passed, for its line of output
    report: Callable[[Sequence[Result]], list[Result]] = lambda results: promise_rows(
        results
    )  # about promises, from all
    counts: Callable[[str], bool] = lambda job: True  # whether a job that broke makes the whole unsound


def arguments_of(part: Part, description: str | None) -> argparse.ArgumentParser:
    """What every part can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="jobs whose name holds all of these words")
    parser.add_argument("--tiny", action="store_true", help="sizes for the harness itself")
    parser.add_argument("--quick", action="store_true", help="a few sizes, where the part has many")
    parser.add_argument("--budget-s", type=float, default=part.budget_s, help="jobs that it does not reach are skipped")
    parser.add_argument("--at-once", type=int, default=1, help="child processes side by side; not for times")
    parser.add_argument("--again", action="store_true", help="also jobs that passed in an earlier run")
    parser.add_argument("--out", type=Path, default=LOCAL)
    parser.add_argument("--in-process", action="store_true", help="no child process; for debuggers and sanitizers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(part: Part, description: str | None) -> int:
    """Run a part as a program, with the command line's options."""
    given = sys.argv[1:]
    return run_part(part, arguments_of(part, description).parse_args(given), given)


def run_part(part: Part, options: argparse.Namespace, given: Sequence[str]) -> int:
    """Answer every job, write after each; 1 where something that counts was wrong or broke."""
    if options.child:
        answer_calls(JobChild(part, options))
        return 0
    words, all_jobs = options.only.split(), part.jobs(options)
    jobs = [job for job in all_jobs if all(word in job for word in words)]
    path = options.out / f"{part.name}.json"
    kind = {
        "sources": sources(),
        **{name: getattr(options, name, None) for name in ("device", "tiny", "quick", "check")},
    }
    found = {} if options.again else _earlier(path, kind)
    asking, left = Asking(part, options, given), [job for job in jobs if job not in found]
    with closing(asking):
        about = next(asking.results([ABOUT], {})) if left else {"status": "passed"}
        if about["status"] != "passed":
            print(_line(part, about))
            return 1
        for result in asking.results(left, about):
            found[result["job"]] = result
            print(_line(part, result), flush=True)
            results = [dict(found[job]) for job in all_jobs if job in found]
            promises = part.report(results)
            written = {"part": part.name, "commit": commit(), "kind": kind, "about": about}
            _write(path, {**written, "promises": promises, "results": results})
    for row in part.report([dict(result) for result in found.values()]):
        figure = "" if row["reached"] is None else f"{row['reached']:.3g}"
        wanted = "" if row["least"] is None else f"at least {row['least']:.2f}"
        print(f"{row['status']:13} {figure:>8} {wanted:14} {row['promise']} ({row['cases']} cases; {row['at']})")
    print(f"{tally(list(found.values()))}; {path}")
    return 1 if any(result["status"] in BROKEN for job, result in found.items() if part.counts(job)) else 0


class Asking:
    """Asks jobs of children, some side by side; each is replaced when a job has ended or spoilt it."""

    def __init__(self, part: Part, options: argparse.Namespace, given: Sequence[str]) -> None:
        self._part, self._options, self._given = part, options, given
        self._end_s = time.monotonic() + options.budget_s
        self._local = JobChild(part, options) if options.in_process else None
        self._idle: list[Child] = []

    def results(self, jobs: Sequence[str], about: Result) -> Iterator[Result]:
        """Each job's result as it comes: in order where one child answers all."""
        waiting, results = queue.SimpleQueue[str](), queue.SimpleQueue[Result]()
        for job in jobs:
            waiting.put(job)
        for _ in range(min(self._options.at_once, len(jobs))):
            threading.Thread(target=self._work, args=(waiting, results, about), daemon=True).start()
        for _ in jobs:
            yield results.get()

    def _work(self, waiting: queue.SimpleQueue[str], results: queue.SimpleQueue[Result], about: Result) -> None:
        child = self._idle.pop() if self._idle else None
        with suppress(queue.Empty):
            while True:
                job, begin_s = waiting.get_nowait(), time.monotonic()
                try:
                    child, answer = self._ask(child, job, about)
                except Exception as error:  # no child can be started, say
                    answer = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
                results.put({"job": job, **answer, "job_s": round(time.monotonic() - begin_s, 2)})
        if child is not None:
            self._idle.append(child)

    def close(self) -> None:
        """End the children."""
        for child in self._idle:
            child.stop()

    def _ask(self, child: Child | None, job: str, about: Result) -> tuple[Child | None, Result]:
        """A job's answer, and the child if it can be asked again."""
        left_s, start_s = self._end_s - time.monotonic(), 0.0 if child else START_S
        if left_s <= 1.0:
            return child, {"status": "skipped", "error": "the budget was spent"}
        if self._local is not None:
            return None, self._local.answer(job, about)
        if child is None:
            child = Child(self._part.name, sys.executable, self._part.module, os.environ, [*self._given, "--child"])
        try:
            limit_s = min(left_s, self._part.job_s + start_s)
            answer = child.call("answer", timeout_s=limit_s, job=job, about=about)
        except ChildError as error:
            status = {ChildTimeout: "timed out", ChildEnded: "crashed"}.get(type(error), "failed")
            answer = {"status": status, "error": str(error), "fatal": True}
        if answer.pop("fatal", False):
            child.kill()
            child = None
        return child, answer


class JobChild:
    """The child's side: answers jobs by the part's function."""

    def __init__(self, part: Part, options: argparse.Namespace) -> None:
        self._part, self._options = part, options

    def answer(self, job: str, about: Result) -> Result:
        """A job's answer, or why it failed; `fatal` where this process must not be asked again."""
        try:
            found = self._part.answer(self._options, job, about)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            is_fatal = any(sign in said for sign in FATAL) or device_error() is not None
            where = traceback.format_exc().splitlines()[-LAST_LINES:]
            return {"status": "failed", "error": said[:2000], "where": where, "fatal": is_fatal}
        # A job that reports `fatal` has tested the device itself.
        lost = None if found.get("fatal") else device_error()
        return found if lost is None else {"status": "failed", "error": f"after the job: {lost}", "fatal": True}


def device_error() -> str | None:
    """What the device says of this process's work, which is asynchronous: errors stay, and every later call fails of them."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return None


def promise_rows(results: Sequence[Result]) -> list[Result]:
    """A row for each promise of some results, decided by the worst case; `least` is None where a figure is only reported.

    A result names its promises as name -> [what it is about, least], and has what was `reached` by the same words.
    """
    found: dict[tuple[str, str, float | None], list[tuple[float, str]]] = {}  # promise -> what each case reached
    for result in results:
        for name, (of, least) in result.get("promises", {}).items():
            cases = found.setdefault((name, of, least), [])
            if (reached := result.get("reached", {}).get(of)) is not None:
                cases.append((reached, result["job"]))
    rows = []
    for (name, of, least), cases in found.items():
        row: Result = {"promise": name, "of": of, "least": least, "cases": len(cases)}
        if not cases:
            rows.append(row | {"status": "not measured", "reached": None, "at": None})
            continue
        reached, at = min(cases)
        status = "reported" if least is None else "met" if reached >= least else "missed"
        rows.append(row | {"status": status, "reached": reached, "at": at})
    return rows


def tally(results: Sequence[Result]) -> str:
    """How many results have which status, worst first."""
    counts = Counter(result["status"] for result in results)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]) or "nothing ran"


@cache
def sources() -> str:
    """A digest of what the figures depend on: the sources of kernels, worker, benchmarks and tests, committed or not."""
    digest = hashlib.sha256()
    for folder in ("kernels", "worker", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _line(part: Part, result: Result) -> str:
    """One line of output."""
    said = str(result.get("error", ""))[:160] or (part.figure(result) if result["status"] == "passed" else "")
    return f"{result['status']:9} {result['job']:60} {said}".rstrip()


def _earlier(path: Path, kind: Result) -> dict[str, Result]:
    """The jobs that passed in an earlier run of the same kind."""
    if not path.exists():
        return {}
    written = json.loads(path.read_text())
    is_same = written.get("kind") == kind
    return {result["job"]: result for result in written["results"] if is_same and result["status"] == "passed"}


def _write(path: Path, written: Result) -> None:
    """Write the file whole or not at all, so that no reader meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(written, indent=1, default=str) + "\n")
    beside.replace(path)
