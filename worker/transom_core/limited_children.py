"""Child processes that run what comes from outside, under limits of CPU time and memory.

Some work of a request cannot be bounded from within: a chat template is a program, and a JSON schema can make the library that
compiles it work for hours. So it runs in a child, which ends by a signal when one task takes too long, and its parent starts
another. The first task starts a child; later ones reuse it. A task takes a child to itself: when all are busy and there are
`max_processes`, it waits. The children end with their parent.

Both pipes carry messages: four bytes with the length (little-endian), then JSON in ASCII. A child's module runs as
`python -m MODULE CPU_S MEMORY_BYTES`, calls `serve`, and ends with its standard input. Its answer to a task is any object;
`{"too_large": "it needs more than ..."}` says that the task has exceeded a limit, after which the child is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

Message = dict[str, Any]

MAX_PROCESSES = 2
_LENGTH_BYTES = 4
_KEPT_VARIABLES = (
    "LD_LIBRARY_PATH",
    "TZ",
)  # of the environment; it may hold keys, which code from outside has no business with
_OWN_FAULT = (
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
)  # how native code ends that gets no memory, or nests too deeply


class LimitedChildren:
    """A few child processes; any thread may call `ask`. The limits are for one task: seconds of CPU time, and bytes."""

    def __init__(
        self, module: str, *, cpu_s: float, memory_bytes: int, first: Callable[[], Message] | None = None
    ) -> None:
        """`first` makes the message that a new child gets before its first task, and reads without a limit."""
        self._module, self._first = module, first
        self._cpu_s, self._memory_bytes = cpu_s, memory_bytes
        self._free = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: set[subprocess.Popen[bytes]] = set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The child processes that run."""
        return tuple(process.pid for process in self._all)

    def ask(self, task: Message) -> Message:
        """Have a child do a task, and return its answer.

        The answer is `{"too_large": reason}` where the task has exceeded a limit, and `{"killed": reason}` where the child was
        ended from outside twice.
        """
        answer: Message = {}
        for _ in range(2):  # once more if the child was killed from outside, perhaps while it was idle
            with self._process() as process:
                answer = self._exchange(process, task)
            if "killed" not in answer:
                break
        return answer

    def close(self) -> None:
        """End the child processes; idempotent. A later task would start another."""
        self._idle.clear()
        for process in list(self._all):
            self._end(process)

    @contextlib.contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        """Lend a child, and take it back if it was not ended meanwhile."""
        with self._free:
            process = self._idle.pop() if self._idle else self._start()
            try:
                yield process
            except BaseException:
                self._end(process)  # an answer may be on its way: it would be taken for the next task's
                raise
            if process in self._all:
                self._idle.append(process)

    def _exchange(self, process: subprocess.Popen[bytes], task: Message) -> Message:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # the child has ended: its exit status says why
            _send(process.stdin, task)
        answer = _receive(process.stdout)
        if answer is not None and "too_large" not in answer:
            return answer
        if answer is None:
            answer = self._reason(process.wait())
        self._end(process)  # after a failed allocation a fresh child is safer
        return answer

    def _reason(self, status: int) -> Message:
        memory = f"its memory is limited to {self._memory_bytes >> 20} MiB"
        if status == -signal.SIGPROF:
            return {"too_large": f"it took more than {self._cpu_s:g} s"}
        if -status in _OWN_FAULT:
            return {"too_large": f"it nests too deeply or needs too much memory; {memory}"}
        return {"killed": f"its process ended ({status}; {memory})"}

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-S", "-m", self._module, str(self._cpu_s), str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "PYTHONPATH": paths, "PYTHONUTF8": "1"},
        )
        self._all.add(process)
        if self._first is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                _send(process.stdin, self._first())
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._all.discard(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        process.kill()
        process.wait()


def serve(respond: Callable[[Message], Message], *, prepare: Callable[[Message], None] | None = None) -> None:
    """Do the parent's tasks one by one, each under the limits of this process's command line.

    `prepare` takes the first message, before there are limits; what the process uses then is not counted as a task's memory.
    """
    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent decides
    tasks, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    limit = memory_bytes
    if prepare is not None:
        first = _receive(tasks)
        if first is None:
            return
        prepare(first)
        limit += _address_space_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (task := _receive(tasks)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process inside any code
        try:
            answer = respond(task)
        except MemoryError:
            answer = {"too_large": f"it needs more than {memory_bytes >> 20} MiB of memory"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, answer)


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _send(pipe: IO[bytes], message: Message) -> None:
    """Write one message.

    Raises:
        OSError: the other process has ended.
        TypeError, ValueError: a value of the message is not JSON's.
    """
    data = json.dumps(message).encode("ascii")
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Message | None:
    """Read one message; None if the other process has ended."""
    length = pipe.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    data = pipe.read(int.from_bytes(length, "little"))
    if len(data) < int.from_bytes(length, "little"):
        return None
    message: Message = json.loads(data)
    return message
