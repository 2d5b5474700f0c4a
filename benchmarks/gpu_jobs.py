"""Jobs in a child process that is replaced when a job ends it or hangs: one wrong kernel costs its own figures and nobody else's.

A script calls `serve` in the child and `run_jobs` in the parent. The child reads a job's name a line from its standard input and
answers with a line of JSON; anything else that it prints goes to the parent's standard error.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Result = dict[str, Any]

MARK = "RESULT "
LAST_LINES = 12  # of what a lost child said
START_S = 90.0  # for the imports of a child, on top of its first job
FATAL = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "CUDA error",
)


class Child:
    """One process that answers jobs, and what it last said."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._answers: queue.Queue[Result | None] = queue.Queue()
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.is_new = True

    def ask(self, job: str, limit_s: float) -> Result:
        """The answer to a job; of a child that ended or took too long what is known of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(job + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            return {"status": "timed out", "error": f"no answer within {limit_s:.0f} s", "fatal": True}
        except OSError:
            answer = None
        self.is_new = False
        if answer is None:
            code = self._process.wait()
            return {"status": "crashed", "error": "\n".join(self.said[-LAST_LINES:]), "exit_code": code, "fatal": True}
        return answer

    def end(self, *, now: bool = False) -> None:
        """Close its input, and kill it `now` or if that does not end it; it has nothing to save."""
        assert self._process.stdin is not None
        if now:
            self._process.kill()
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(json.loads(line.removeprefix(MARK)))
            else:
                self.said.append(line.rstrip())
                print(line, end="", file=sys.stderr, flush=True)
        self._answers.put(None)


def run_jobs(command: Sequence[str], jobs: Sequence[str], *, budget_s: float, job_s: float) -> Iterator[Result]:
    """Each job's answer, in order, with its name as `job`; jobs that the budget does not reach are `skipped`."""
    begin_s, child = time.monotonic(), None
    try:
        for job in jobs:
            left_s = budget_s - (time.monotonic() - begin_s)
            if left_s <= 1.0:
                yield {"job": job, "status": "skipped", "error": f"the budget of {budget_s:.0f} s was spent"}
                continue
            child = child or Child(command)
            job_begin_s = time.monotonic()
            answer = child.ask(job, min(left_s, job_s + (START_S if child.is_new else 0.0)))
            if answer.pop("fatal", False):
                child.end(now=True)
                child = None
            yield {"job": job, **answer, "job_s": round(time.monotonic() - job_begin_s, 2)}
    finally:
        if child is not None:
            child.end()


def serve(answer: Callable[[str], Result]) -> None:
    """Answer every job on standard input; a failure is an answer, and one that broke the device ends this process."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    for line in sys.stdin:
        found = answer_or_error(answer, line.strip())
        print(MARK + json.dumps(found), file=results, flush=True)
        if found.get("fatal"):
            break


def answer_or_error(answer: Callable[[str], Result], job: str) -> Result:
    """A job's answer, or what it failed of."""
    try:
        return answer(job)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        where = traceback.format_exc().splitlines()[-LAST_LINES:]
        return {
            "status": "failed",
            "error": said[:2000],
            "where": where,
            "fatal": any(sign in said for sign in FATAL),
        }
