"""Child processes that run untrusted work of requests under limits of CPU time, wall-clock time and memory.

Some work of a request cannot be bounded from within: a chat template is a program, and a JSON schema can make the library that
compiles it work for hours. So this work runs in a child process. A signal ends a child whose task takes too long, and the parent
then starts another one. The first task starts a child, and later tasks reuse it. A child does one task at a time: while
`MAX_PROCESSES` children are busy, further tasks wait. A child that does not answer for `wall_s` (because it is stopped, or gets no
CPU time) is killed, and another one gets the task. Children run at a lower priority (`nice`) than the processes that serve
requests. *Patient* tasks have a child of their own at the lowest priority, which hardly runs where a CPU has anything else to do.
Children end with their parent.

A child runs this module as its main program, `python -m transom_core.limited_children MODULE CPU_S MEMORY_BYTES PATIENT`, and ends
when its standard input is closed. Both pipes carry messages: four bytes with the length (little-endian), then JSON in ASCII.

    first message    the child calls `prepare(first)` of MODULE, which returns the function `respond`; there are no limits yet
    each task        the child calls `respond(task)` under the limits, and sends the answer, which is any object

The answer `{"too_large": "it needs more than ..."}` says that the task has exceeded a limit; the child is then replaced. If
`prepare` fails, the child answers `{"unprepared": "..."}`; it would fail in any other child too, so no other one is started.
"""

import contextlib
import importlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

Message = dict[str, Any]
Respond = Callable[[Message], Message]

logger = logging.getLogger("transom")

MAX_PROCESSES = 2  # besides one for patient tasks
WALL_S = 60.0  # for one task with the start of its child; the limit of CPU time ends most tasks long before
# 1.5 % of the CPU share of a parent without niceness; SCHED_IDLE has 0.3 %, by which a large task would not end on a busy machine,
# and 8 % beside a parent of niceness 15, as Ray's workers have by default.
_PATIENT_NICENESS = 19
PATIENT_WALLS = 5  # a patient task may take up to 5 times as long as another
_NICENESS = 5  # a third of the CPU share of a process that serves requests, if both want one core
_LENGTH_BYTES = 4
_MAX_REASON = 300  # characters
# The variables that a child inherits: others of the environment may hold keys, which code from outside must not see.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "TZ")
# The signals by which native code ends when it gets no memory, or nests too deeply.
_OWN_FAULT = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


class LimitedChildren:
    """A few child processes; any thread may call `ask`. The limits are for one task: seconds of CPU time, seconds, and bytes."""

    def __init__(
        self,
        module: str,
        *,
        cpu_s: float,
        memory_bytes: int,
        wall_s: float = WALL_S,
        first: Callable[[], Message] = dict,
    ) -> None:
        """`module` has the function `prepare`, and `first` makes the message that a new child gives it before its first task."""
        self._module, self._first = module, first
        self._cpu_s, self._memory_bytes, self._wall_s = cpu_s, memory_bytes, wall_s
        # By whether they are for patient tasks: how many children may begin a task, and the idle ones.
        self._free = {False: threading.BoundedSemaphore(MAX_PROCESSES), True: threading.BoundedSemaphore(1)}
        self._lock = threading.Lock()  # guards the fields below
        self._unprepared: Message | None = None  # the answer of a child that could not prepare itself
        self._idle: dict[bool, list[subprocess.Popen[bytes]]] = {False: [], True: []}
        self._all: set[subprocess.Popen[bytes]] = set()
        self._prepared: set[subprocess.Popen[bytes]] = set()  # the children that have got the first message

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the children that run."""
        with self._lock:
            return tuple(process.pid for process in self._all)

    def ask(self, task: Message, *, is_patient: bool = False) -> Message:
        """Have a child do a task, which may be patient, and return its answer.

        The answer is `{"too_large": reason}` if the task has exceeded a limit, `{"killed": reason}` if the child was ended from
        outside or did not answer, twice, and `{"unprepared": reason}` if no child can do any task.
        """
        answer: Message = {}
        for _ in range(2):  # once more if the child was killed from outside
            if self._unprepared is not None:
                return self._unprepared
            with self._process(is_patient) as process:
                answer = self._exchange(process, task, self._wall_s * (PATIENT_WALLS if is_patient else 1))
            if "killed" not in answer:
                break
        if "unprepared" in answer:
            self._note_unprepared(answer)
        return answer

    def close(self) -> None:
        """End the child processes; idempotent. A later task would start another."""
        with self._lock:
            for idle in self._idle.values():
                idle.clear()
            processes = list(self._all)
        for process in processes:
            self._end(process)

    def _note_unprepared(self, answer: Message) -> None:
        """Remember that no child can do a task; the first one is logged."""
        with self._lock:
            is_first, self._unprepared = self._unprepared is None, answer
        if is_first:
            logger.error("%s cannot work: %s", self._module, answer["unprepared"])

    @contextlib.contextmanager
    def _process(self, is_patient: bool) -> Iterator[subprocess.Popen[bytes]]:
        """Lend a child, and take it back unless it was ended meanwhile."""
        idle = self._idle[is_patient]
        with self._free[is_patient]:
            process = self._take(idle) or self._start(is_patient)
            try:
                yield process
            except BaseException:
                self._end(process)  # an answer may be on its way: it would be taken for the next task's
                raise
            with self._lock:
                if process in self._all:
                    idle.append(process)

    def _take(self, idle: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes] | None:
        """Take a child that is idle, and end those that were killed while they were."""
        while True:
            with self._lock:
                process = idle.pop() if idle else None
            if process is None or process.poll() is None:
                return process
            self._end(process)

    def _exchange(self, process: subprocess.Popen[bytes], task: Message, wall_s: float) -> Message:
        """Send a task (to a new child the first message before it), and return its answer, or why there is none."""
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            process.kill()  # this also ends the reading and writing of the pipes below

        timer = threading.Timer(wall_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(OSError):  # the child has ended: its exit status says why
                if process not in self._prepared:
                    self._prepared.add(process)
                    _send(process.stdin, self._first())
                _send(process.stdin, task)
            answer = _receive(process.stdout)
        finally:
            timer.cancel()
        if answer is not None and not answer.keys() & {"too_large", "unprepared"}:
            return answer
        if answer is None:
            answer = self._reason(process.wait(), late_s=wall_s if is_late.is_set() else None)
        self._end(process)  # after a failed allocation a fresh child is safer
        return answer

    def _reason(self, status: int, *, late_s: float | None) -> Message:
        """Return the answer to a task whose child has ended with this exit status instead of answering."""
        if late_s is not None and status == -signal.SIGKILL:
            return {"killed": f"its process did not answer for {late_s:g} s"}
        memory = f"its memory is limited to {self._memory_bytes >> 20} MiB"
        if status == -signal.SIGPROF:
            return {"too_large": f"it took more than {self._cpu_s:g} s"}
        if -status in _OWN_FAULT:
            return {"too_large": f"it nests too deeply or needs too much memory; {memory}"}
        return {"killed": f"its process ended ({status}; {memory})"}

    def _start(self, is_patient: bool) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        limits = map(str, (self._cpu_s, self._memory_bytes, int(is_patient)))
        process = subprocess.Popen(
            [sys.executable, "-S", "-m", __name__, self._module, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "PYTHONPATH": paths, "PYTHONUTF8": "1"},
        )
        with self._lock:
            self._all.add(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._all.discard(process)
            self._prepared.discard(process)
        process.kill()  # first: another thread may read its answer, and closing the pipe would wait for that
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _serve(module: str, cpu_s: float, memory_bytes: int, *, is_patient: bool) -> None:
    """Do the parent's tasks one by one. What the process uses before the first one is not counted as a task's memory."""
    for terminal in (signal.SIGINT, signal.SIGHUP):
        signal.signal(terminal, signal.SIG_IGN)  # they reach every process of the terminal; the parent decides
    if is_patient and os.nice(0) > _NICENESS and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(_PATIENT_NICENESS if is_patient else _NICENESS)
    tasks, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    first = _receive(tasks)
    if first is None:
        return
    task_module = importlib.import_module(module)  # an error ends this child, and a later one may succeed
    try:
        respond: Respond = task_module.prepare(first)
    except MemoryError:
        raise  # there may be more memory for the next child
    except BaseException as error:  # panics of native code are not subclasses of Exception
        _send(answers, {"unprepared": f"{type(error).__name__}: {error}"[:_MAX_REASON]})
        return
    limit = memory_bytes + _address_space_bytes()
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
        TypeError, ValueError: a value of the message cannot be written as JSON.
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


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), is_patient=sys.argv[4] == "1")
