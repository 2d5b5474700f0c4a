"""A child process that answers calls: one line of JSON in, one line of JSON out.

Each engine is measured in a child, because an engine needs its own environment variables, its own Python environment, or both.
This file uses the standard library only: the parent imports `Child`, and a script that runs in the child, under the Python of any
engine, imports `answer_calls`:

    parent:  {"call": "decode", "steps": 32}
    child:   {"answer": {"seconds": 0.7, "tokens": 256}}     or     {"error": "ValueError: ..."}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STOP_TIMEOUT_S = 20.0
LAST_CHARACTERS = 3000  # of a child's log, in the message when the child has ended


class ChildError(RuntimeError):
    """A call failed in the child, or the child has ended."""


class Child:
    """One running child. Its stderr, and all that its libraries print, go to a temporary log file."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, `stop` closes it
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._calls, self._answers = self._process.stdin, self._process.stdout

    def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Call one of the child's functions and wait for what it returns. Raises ChildError."""
        try:
            self._calls.write(json.dumps({"call": name, **arguments}) + "\n")
            self._calls.flush()
        except BrokenPipeError:
            raise self._ended(name) from None
        line = self._answers.readline()
        if not line:
            raise self._ended(name)
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"{self.name}: {name} failed: {reply['error']}")
        answer: dict[str, Any] = reply["answer"]
        return answer

    def stop(self) -> None:
        """End the child: the end of its input makes it return, and a child that does not return is killed."""
        try:
            self._calls.close()
            self._process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()

    def _ended(self, call: str) -> ChildError:
        code = self._process.wait()
        self._log.seek(0)
        return ChildError(
            f"{self.name}: the child ended with code {code} during {call}: {self._log.read()[-LAST_CHARACTERS:]}"
        )


def answer_calls(functions: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """In the child: answer calls until the input ends. What libraries print goes to stderr, not between the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            reply = {"answer": functions[arguments.pop("call")](**arguments)}
        except Exception as error:  # every failure belongs to the parent, which reports it
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
