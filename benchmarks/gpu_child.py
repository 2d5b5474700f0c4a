"""A process that answers jobs, and both ends of the pipe to it.

The child reads a job's name a line from its standard input and answers with a line of JSON; anything else that it prints goes to
the parent's standard error.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

Result = dict[str, Any]

MARK, KNOWN = "RESULT ", "KNOWN "  # an answer; what is known of it before its end
LAST_LINES = 12  # of what a lost child said
END_S = 5.0  # for a child to end; one whose kernel never returns may outlast its kill
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
        self._known: Result | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, job: str, limit_s: float) -> Result:
        """The answer to a job; of a child that ended or took too long what is known of it."""
        assert self._process.stdin is not None
        self._known = None
        try:
            self._process.stdin.write(job + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=limit_s)
        except queue.Empty:
            return self._broken("timed out", f"no answer within {limit_s:.0f} s")
        except OSError:
            answer = None
        if answer is None:
            code = self._process.wait()
            return self._broken("crashed", "\n".join(self.said[-LAST_LINES:])) | {"exit_code": code}
        return answer

    def _broken(self, status: str, error: str) -> Result:
        """What was known before stands."""
        if self._known is not None:
            return self._known | {"broke_later": status, "error": error, "fatal": True}
        return {"status": status, "error": error, "fatal": True}

    def end(self) -> None:
        """Kill it."""
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(json.loads(line.removeprefix(MARK)))
            elif line.startswith(KNOWN):
                self._known = json.loads(line.removeprefix(KNOWN))
            else:
                self.said.append(line.rstrip())
                print(line, end="", file=sys.stderr, flush=True)
        self._answers.put(None)


_results: list[TextIO] = []  # where a child answers


def serve(answer: Callable[[str], Result]) -> None:
    """Answer every job on standard input; a failure is an answer, and one that broke the device ends this process."""
    _results.append(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    for line in sys.stdin:
        found = answer_or_error(answer, line.strip())
        print(MARK + json.dumps(found, default=str), file=_results[0], flush=True)
        if found.get("fatal"):
            break


def tell(known: Result) -> None:
    """What stands of this job's answer whatever the rest of it does to this process."""
    for results in _results:
        print(KNOWN + json.dumps(known, default=str), file=results, flush=True)


def answer_or_error(answer: Callable[[str], Result], job: str) -> Result:
    """A job's answer, or what it failed of; `fatal` where the device cannot be used any more."""
    try:
        found = answer(job)
        lost = None if found.get("fatal") else device_error()  # a job that reports `fatal` has tested the device itself
        return found if lost is None else {"status": "failed", "error": f"after the job: {lost}", "fatal": True}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        where = traceback.format_exc().splitlines()[-LAST_LINES:]
        is_fatal = any(sign in said for sign in FATAL) or device_error() is not None
        return {"status": "failed", "error": said[:2000], "where": where, "fatal": is_fatal}


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
