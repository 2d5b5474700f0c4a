"""Jobs in child processes that are replaced when a job ends them or hangs: one wrong kernel costs its own figures alone.

A script describes itself as a `Script` and calls `run_script`, which is both sides: the parent asks, prints and writes what is
known after every answer; the child reads a job's name a line from its standard input and answers with a line of JSON. Anything
else that a child prints goes to the parent's standard error.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_child import Child, Result, answer_or_error, serve
from gpu_results import Report, is_sound, tally, write

LOCAL = Path(__file__).parent / "results" / "local"
START_S = 90.0  # for the imports of a child, on top of its first job


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A part of the benchmark: what it asks for, and how that is answered, told and written."""

    name: str  # of its results
    path: str
    first: str  # the job that is asked first: about the device
    jobs: Callable[[argparse.Namespace], list[str]]  # the others
    answer: Callable[[argparse.Namespace, str], Result]
    line: Callable[[Result], str]  # of a result, for who watches
    report: Callable[[argparse.Namespace, Result, list[Result]], Report]
    job_s: float  # the most that one may take
    budget_s: float
    counts: Callable[[Result], bool] = lambda result: True  # whether a result that broke makes the whole unsound


def arguments_of(script: Script, description: str | None) -> argparse.ArgumentParser:
    """What every script can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="jobs whose name holds all of these words")
    parser.add_argument("--tiny", action="store_true", help="sizes for the harness itself")
    parser.add_argument(
        "--budget-s", type=float, default=script.budget_s, help="jobs that it does not reach are skipped"
    )
    parser.add_argument("--at-once", type=int, default=1, help="child processes side by side; not for times")
    parser.add_argument("--out", type=Path, default=LOCAL)
    parser.add_argument("--list", action="store_true", help="names of the jobs")
    parser.add_argument("--in-process", action="store_true", help="no child process; for debuggers and sanitizers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def run_script(script: Script, options: argparse.Namespace, given: Sequence[str]) -> int:
    """Answer every job, write after each; 1 where something that counts was wrong or broke."""
    if options.child:
        serve(partial(script.answer, options))
        return 0
    words = options.only.split()
    jobs = [script.first, *(job for job in script.jobs(options) if all(word in job for word in words))]
    if options.list:
        print("\n".join(jobs[1:]))
        return 0
    found: dict[str, Result] = {}
    path, report = options.out / f"{script.name}.json", Report(results=(), table="")
    for result in _results(script, options, jobs, given):
        found[result["job"]] = result
        if result["job"] != script.first or not is_sound([result]):
            print(script.line(result), flush=True)
        path, report = _write(script, options, [dict(found[job]) for job in jobs if job in found])
    for row in report.targets:
        figure = "" if row["figure"] is None else f"{row['figure']:.3g}"
        print(f"{row['status']:13} {figure:>8} {row['wanted']:14} {row['target']} ({row['cases']} cases; {row['at']})")
    print(f"{tally([found[job] for job in jobs[1:]])}; {path}")
    return 0 if is_sound([result for result in found.values() if script.counts(result)]) else 1


def _results(
    script: Script, options: argparse.Namespace, jobs: Sequence[str], given: Sequence[str]
) -> Iterator[Result]:
    if options.in_process:
        for job in jobs:
            answer = answer_or_error(partial(script.answer, options), job)
            answer.pop("fatal", None)  # there is no other process to ask
            yield {"job": job, **answer}
        return
    command = [sys.executable, script.path, *given, "--child"]
    yield from run_jobs(command, jobs, budget_s=options.budget_s, job_s=script.job_s, at_once=options.at_once)


def _write(script: Script, options: argparse.Namespace, found: list[Result]) -> tuple[Path, Report]:
    first = found.pop(0) if found and found[0]["job"] == script.first else {}
    about = first.get("about", {}) | {
        name: first[name] for name in ("ceilings", "clocks", "error") if first.get(name) is not None
    }
    report = script.report(options, first, found)
    return write(options.out, script.name, about=about, report=report), report


def run_jobs(
    command: Sequence[str], jobs: Sequence[str], *, budget_s: float, job_s: float, at_once: int = 1
) -> Iterator[Result]:
    """Each job's answer with its name as `job`, as they come: in order where one child answers all. What the budget does not
    reach is `skipped`."""
    waiting, answers = queue.SimpleQueue[str](), queue.SimpleQueue[Result]()
    for job in jobs:
        waiting.put(job)
    desks = [Desk(command, end_s=time.monotonic() + budget_s, job_s=job_s) for _ in range(min(at_once, len(jobs)))]
    for desk in desks:
        threading.Thread(target=desk.work, args=(waiting, answers), daemon=True).start()
    try:
        for _ in jobs:
            yield answers.get()
    finally:
        for desk in desks:
            desk.close()


class Desk:
    """Asks one job after the other of one child at a time."""

    def __init__(self, command: Sequence[str], *, end_s: float, job_s: float) -> None:
        """Nothing is asked after `end_s` of the monotonic clock."""
        self._command, self._end_s, self._job_s = command, end_s, job_s
        self._child: Child | None = None

    def work(self, waiting: queue.SimpleQueue[str], answers: queue.SimpleQueue[Result]) -> None:
        """Until no job waits."""
        with suppress(queue.Empty):
            while True:
                job, begin_s = waiting.get_nowait(), time.monotonic()
                try:
                    answer = self.answer(job)
                except Exception as error:  # no child can be started, say
                    answer = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
                answers.put({"job": job, **answer, "job_s": round(time.monotonic() - begin_s, 2)})

    def answer(self, job: str) -> Result:
        """A job's answer. One that breaks a child which others used before it is asked once more of a new child, since an earlier
        job may have left the device broken."""
        was_used = self._child is not None
        answer = self._ask(job)
        if answer.pop("fatal", False):
            self.close()
            if was_used and answer["status"] in ("failed", "crashed") and self._left_s > 1.0:
                answer = self._ask(job) | {"asked_again": True}
                if answer.pop("fatal", False):
                    self.close()
        return answer

    def close(self) -> None:
        """End the child; it has nothing to save."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    @property
    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _ask(self, job: str) -> Result:
        if self._left_s <= 1.0:
            return {"status": "skipped", "error": "the budget was spent"}
        start_s = 0.0 if self._child is not None else START_S
        self._child = self._child or Child(self._command)
        return self._child.ask(job, min(self._left_s, self._job_s + start_s))
