"""Jobs in a child: whatever a job does to it, the others get their answers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

import gpu_child
import gpu_jobs
from gpu_child import answer_or_error
from gpu_jobs import Script, arguments_of, run_jobs, run_script
from gpu_results import Report, is_sound, markdown, tally

CHILD = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from gpu_child import serve, tell

answered = []

def answer(job):
    print("what a library says")
    answered.append(job)
    if job == "suffer" and len(answered) > 1:  # of what an earlier job did
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if job == "rival":
        tell({{"status": "passed", "figure": 7}})
        os._exit(4)
    if job == "spoil":
        return {{"status": "passed", "pid": os.getpid(), "fatal": True}}
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
    first, failed, last = run_jobs(command, ["one", "fail", "two"], budget_s=600, job_s=600)
    assert (first["status"], first["pid"]) == ("passed", last["pid"])
    assert failed["status"] == "failed"
    assert failed["error"] == "ValueError: such a number"


def test_a_child_that_ends_or_loses_its_device_is_replaced(command: list[str]) -> None:
    first, ended, second, broken, third = run_jobs(
        command, ["one", "exit", "two", "break", "three"], budget_s=600, job_s=60
    )
    assert (ended["status"], ended["exit_code"]) == ("crashed", 3)
    assert "about to end" in ended["error"]
    assert broken["status"] == "failed"
    assert len({first["pid"], second["pid"], third["pid"]}) == 3


def test_a_job_that_suffers_from_an_earlier_one_is_asked_once_more_of_a_new_child(command: list[str]) -> None:
    first, asked_again = run_jobs(command, ["one", "suffer"], budget_s=600, job_s=600)
    assert asked_again["status"] == "passed"
    assert asked_again["asked_again"]
    assert first["pid"] != asked_again["pid"]
    [broken] = run_jobs(command, ["break"], budget_s=600, job_s=600)
    assert "asked_again" not in broken
    assert "fatal" not in broken


def test_a_figure_stands_whose_child_must_not_be_used_any_more(command: list[str]) -> None:
    spoilt, after = run_jobs(command, ["spoil", "two"], budget_s=600, job_s=600)
    assert (spoilt["status"], after["status"]) == ("passed", "passed")
    assert spoilt["pid"] != after["pid"]
    assert "asked_again" not in spoilt


def test_what_was_told_before_a_crash_stands(command: list[str]) -> None:
    told, ended = run_jobs(command, ["rival", "exit"], budget_s=600, job_s=600)
    assert (told["status"], told["figure"], told["broke_later"], told["exit_code"]) == ("passed", 7, "crashed", 4)
    assert ended["status"] == "crashed"
    assert "figure" not in ended


def test_children_side_by_side_answer_every_job_once(command: list[str]) -> None:
    jobs = ["one", "exit", "two", "three", "break", "four"]
    results = {result["job"]: result for result in run_jobs(command, jobs, budget_s=600, job_s=600, at_once=3)}
    assert set(results) == set(jobs)
    assert results["exit"]["status"] == "crashed"
    assert all(results[job]["status"] == "passed" for job in ("one", "two", "three", "four"))


def test_a_child_that_cannot_be_started_is_an_answer() -> None:
    [result] = run_jobs(["/nowhere/python"], ["one"], budget_s=600, job_s=600)
    assert result["status"] == "failed"
    assert "FileNotFoundError" in result["error"]


def test_a_job_that_hangs_is_ended(command: list[str]) -> None:
    first, hung, second = run_jobs(command, ["one", "hang", "two"], budget_s=600, job_s=1.0)
    assert hung["status"] == "timed out"
    assert second["status"] == "passed"
    assert first["pid"] != second["pid"]


def test_what_the_budget_does_not_reach_is_listed(command: list[str]) -> None:
    results = list(run_jobs(command, ["one", "two"], budget_s=0.5, job_s=600))
    assert [result["status"] for result in results] == ["skipped", "skipped"]
    assert tally(results) == "2 skipped"
    assert is_sound(results)
    assert not is_sound([{"status": "crashed"}])


def test_an_error_that_shows_only_after_its_job_belongs_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_child, "device_error", lambda: "AcceleratorError: CUDA error")
    found = answer_or_error(lambda job: {"status": "passed"}, "one")
    assert (found["status"], found["fatal"]) == ("failed", True)
    vouched = answer_or_error(lambda job: {"status": "passed", "fatal": True}, "one")
    assert vouched == {"status": "passed", "fatal": True}


def made_script(answer: object, **changes: object) -> Script:
    def report(options: argparse.Namespace, first: dict[str, object], results: list[dict[str, object]]) -> Report:
        return Report(results=results, table="", targets=[])

    values = {
        "name": "part", "path": "", "first": "about", "jobs": lambda options: ["one", "two", "last one"], "answer": answer,
        "line": lambda result: f"{result['job']} {result['status']}", "report": report, "job_s": 60.0, "budget_s": 60.0,
    }  # fmt: skip
    return Script(**(values | changes))  # type: ignore[arg-type]


def run_part(script: Script, folder: Path, *arguments: str) -> int:
    given = ["--in-process", "--out", str(folder), *arguments]
    return run_script(script, arguments_of(script, None).parse_args(given), given)


def test_what_is_known_is_written_after_every_answer(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def answer(options: argparse.Namespace, job: str) -> dict[str, object]:
        path = tmp_path / "part.json"
        seen.append([result["job"] for result in json.loads(path.read_text())["results"]] if path.exists() else [])
        return {"status": "passed", "about": {"commit": "abc"}} if job == "about" else {"status": "passed"}

    assert run_part(made_script(answer), tmp_path) == 0
    assert seen == [[], [], ["one"], ["one", "two"]]
    written = json.loads((tmp_path / "part.json").read_text())
    assert written["commit"] == "abc"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_part_is_as_sound_as_what_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(options: argparse.Namespace, job: str) -> dict[str, object]:
        if job == "two":
            raise ValueError("no")
        return {"status": "passed"}

    assert run_part(made_script(answer), tmp_path) == 1
    assert run_part(made_script(answer, counts=lambda result: result["job"] != "two"), tmp_path) == 0
    assert run_part(made_script(answer), tmp_path, "--only", "one") == 0
    assert "last one passed" in capsys.readouterr().out
    assert run_part(made_script(answer), tmp_path, "--list") == 0
    assert capsys.readouterr().out == "one\ntwo\nlast one\n"


def test_a_table() -> None:
    assert markdown(("a", "b"), [(1.23456, None), ("x|y", 12345.6)]).splitlines()[2:] == [
        "| 1.23 |  |",
        "| x/y | 12,346 |",
    ]
