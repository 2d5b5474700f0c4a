"""Jobs in a child: whatever a job does to it, the others get their answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import gpu_jobs
from gpu_jobs import run_jobs
from gpu_results import is_sound, markdown, tally

CHILD = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from gpu_jobs import serve

def answer(job):
    print("what a library says")
    if job == "exit":
        sys.stderr.write("about to end\\n")
        os._exit(3)
    if job == "hang":
        threading.Event().wait()
    if job == "fail":
        raise ValueError("such a number")
    if job == "break":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {{"status": "passed", "pid": os.getpid()}}

serve(answer)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(folder=str(Path(gpu_jobs.__file__).parent)))
    return [sys.executable, str(script)]


def test_one_child_answers_all_jobs_that_do_it_no_harm(command: list[str]) -> None:
    first, failed, last = run_jobs(command, ["one", "fail", "two"], budget_s=60, job_s=60)
    assert (first["status"], first["pid"]) == ("passed", last["pid"])
    assert failed["status"] == "failed"
    assert failed["error"] == "ValueError: such a number"


def test_a_child_that_ends_or_loses_its_device_is_replaced(command: list[str]) -> None:
    first, ended, second, broken, third = run_jobs(
        command, ["one", "exit", "two", "break", "three"], budget_s=60, job_s=60
    )
    assert (ended["status"], ended["exit_code"]) == ("crashed", 3)
    assert "about to end" in ended["error"]
    assert broken["status"] == "failed"
    assert len({first["pid"], second["pid"], third["pid"]}) == 3


def test_a_job_that_hangs_is_ended(command: list[str]) -> None:
    first, hung, second = run_jobs(command, ["one", "hang", "two"], budget_s=60, job_s=1.0)
    assert hung["status"] == "timed out"
    assert second["status"] == "passed"
    assert first["pid"] != second["pid"]


def test_what_the_budget_does_not_reach_is_listed(command: list[str]) -> None:
    results = list(run_jobs(command, ["one", "two"], budget_s=0.5, job_s=60))
    assert [result["status"] for result in results] == ["skipped", "skipped"]
    assert tally(results) == "2 skipped"
    assert is_sound(results)
    assert not is_sound([{"status": "crashed"}])


def test_a_table() -> None:
    assert markdown(("a", "b"), [(1.23456, None), ("x|y", 12345.6)]).splitlines()[2:] == [
        "| 1.23 |  |",
        "| x/y | 12,346 |",
    ]
