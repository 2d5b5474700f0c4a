"""Child processes under limits: what a child that is stopped, killed or cannot begin costs its parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from transom_core.limited_children import MAX_PROCESSES, LimitedChildren

CHILD = """
import os, signal

def prepare(first):
    if first.get("is_broken"):
        raise ValueError("no vocabulary")
    return respond

def respond(task):
    if task.get("stops"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return {"sum": sum(task["numbers"]), "nice": os.nice(0), "policy": os.sched_getscheduler(0)}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "adding_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    return "adding_child"


@pytest.fixture
def children(module: str) -> Iterator[LimitedChildren]:
    made = LimitedChildren(module, cpu_s=10.0, memory_bytes=256 << 20, wall_s=60.0)
    yield made
    made.close()


def test_a_child_yields_to_its_parent_and_a_patient_task_has_one_that_yields_to_all(children: LimitedChildren) -> None:
    niceness = [children.ask({"numbers": [1]}, is_patient=is_patient)["nice"] for is_patient in (False, True, True)]
    assert niceness == [min(19, os.nice(0) + 5), 19, 19]
    assert len(children.pids) == 2


def test_a_patient_task_yields_to_a_parent_that_has_little_left_to_yield_with(module: str, tmp_path: Path) -> None:
    program = (
        "import os; os.nice(15)\n"
        "from transom_core.limited_children import LimitedChildren\n"
        f"children = LimitedChildren({module!r}, cpu_s=10.0, memory_bytes=256 << 20)\n"
        "print([children.ask({'numbers': []}, is_patient=is_patient)['policy'] for is_patient in (False, True)])\n"
        "children.close()"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    printed = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == str([os.SCHED_OTHER, os.SCHED_IDLE])


def test_a_child_that_does_not_answer_is_killed_and_replaced(module: str) -> None:
    children = LimitedChildren(module, cpu_s=10.0, memory_bytes=256 << 20, wall_s=1.0)
    assert children.ask({"numbers": [1], "stops": True}) == {"killed": "its process did not answer for 1 s"}
    assert not children.pids
    children.close()


def test_a_child_that_is_stopped_while_idle_costs_its_task_nothing(module: str) -> None:
    children = LimitedChildren(module, cpu_s=10.0, memory_bytes=256 << 20, wall_s=20.0)
    assert children.ask({"numbers": [1]})["sum"] == 1
    (pid,) = children.pids
    psutil.Process(pid).suspend()
    children._wall_s, wall_s = 0.5, children._wall_s
    started = children._start

    def start(is_patient: bool) -> subprocess.Popen[bytes]:
        children._wall_s = wall_s  # the new one may take its time
        return started(is_patient)

    children._start = start  # type: ignore[method-assign]
    assert children.ask({"numbers": [2]})["sum"] == 2
    assert pid not in children.pids
    children.close()


def test_an_idle_child_is_taken_under_the_lock(children: LimitedChildren, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the list and the taking no other thread comes in."""

    class Watched(list[subprocess.Popen[bytes]]):
        def __bool__(self) -> bool:
            assert children._lock.locked()
            return super().__len__() > 0

    children._idle[False] = Watched()
    assert [children.ask({"numbers": [i]})["sum"] for i in range(3)] == [0, 1, 2]


def test_children_that_were_killed_cost_nothing(children: LimitedChildren) -> None:
    """As many as a task is tried."""
    with children._process(False), children._process(False):
        pids = children.pids
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert children.ask({"numbers": [2]})["sum"] == 2
    assert not {*pids} & {*children.pids}


def test_many_threads_share_few_children_which_have_no_secrets(
    children: LimitedChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSOM_API_KEYS", "secret")
    with ThreadPoolExecutor(8) as threads:
        sums = list(threads.map(lambda i: children.ask({"numbers": [i]})["sum"], range(40)))
    assert sums == list(range(40))
    assert len(children.pids) <= MAX_PROCESSES
    for pid in children.pids:
        assert "TRANSOM_API_KEYS" not in psutil.Process(pid).environ()


def test_a_child_that_cannot_prepare_itself_is_started_once(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = 0
    popen = subprocess.Popen

    def count_and_start(*args: object, **options: object) -> object:
        nonlocal started
        started += 1
        return popen(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("transom_core.limited_children.subprocess.Popen", count_and_start)
    children = LimitedChildren(module, cpu_s=10.0, memory_bytes=256 << 20, first=lambda: {"is_broken": True})
    for _ in range(3):
        assert children.ask({"numbers": [1]}) == {"unprepared": "ValueError: no vocabulary"}
    assert started == 1
    assert [record.message for record in caplog.records] == ["adding_child cannot work: ValueError: no vocabulary"]
