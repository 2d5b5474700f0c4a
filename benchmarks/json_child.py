"""A child process that answers calls: one line of JSON in, one line of JSON out.

An engine is measured in a child, because it needs its own environment variables, its own Python environment, or both; a kernel on a
GPU, because a wrong one takes its process's device along. This file uses the standard library only: the parent imports `Child`, and
a module that runs in the child, under the Python of any engine, imports `answer_calls`. Children start in the repository's root, so
that they find this package:

    parent:  {"call": "decode", "steps": 32}
    child:   {"answer": {"seconds": 0.7, "tokens": 256}}     or     {"error": "ValueError: ..."}
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 5.0  # a process whose kernel never returns may outlast its kill
LAST_CHARACTERS = 3000  # of a child's log, in the message when the child has ended


class ChildError(RuntimeError):
    """A call failed in the child."""


class ChildEnded(ChildError):
    """The child has ended; the message has its exit code and the end of its log."""


class ChildTimeout(ChildError):
    """The child has not answered in time."""


class Child:
    """One running child. Its stderr, and all that its libraries print, go to a temporary log file."""

    def __init__(
        self, name: str, python: str, module: str, environment: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> None:
        """Run a module under an interpreter, with arguments."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, removed with this object
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()  # lines; an empty one when the child has ended
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, name: str, /, *, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Call one of the child's methods and wait for what it returns.

        Raises:
            ChildError: the method failed.
            ChildEnded: the child has ended.
            ChildTimeout: no answer came within `timeout_s`; the child should be killed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended(name) from None
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildTimeout(f"{self.name}: no answer to {name} within {timeout_s:.0f} s") from None
        if not line:
            raise self._ended(name)
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"{self.name}: {name} failed: {reply['error']}")
        answer: dict[str, Any] = reply["answer"]
        return answer

    def stop(self) -> None:
        """End the child: the end of its input makes it return, and a child that does not return is killed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.kill()

    def kill(self) -> None:
        """End the child at once."""
        self._process.kill()
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")

    def _ended(self, call: str) -> ChildEnded:
        code = self._process.wait()
        self._log.seek(0)
        tail = self._log.read()[-LAST_CHARACTERS:]
        return ChildEnded(f"{self.name}: the child ended with code {code} during {call}: {tail}")


def answer_calls(child: object) -> None:
    """In the child: answer calls with this object's methods until the input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            reply = {"answer": getattr(child, arguments.pop("call"))(**arguments)}
        except Exception as error:  # every failure belongs to the parent, which reports it
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply, default=str) + "\n")
        answers.flush()


def commit() -> str:
    """The commit of this tree, with a mark where files have changed since; TRANSOM_COMMIT where there is no git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        found = ""
    return os.environ.get("TRANSOM_COMMIT") or found or "unknown"
