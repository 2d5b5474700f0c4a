"""Jobs in children: a job may do anything to its process, and the others get their answers, and a run that was ended goes on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import jobs
from benchmarks.gpu.jobs import arguments_of, promise_rows, run_part
from tests.benchmarks.gpu_part import PART


def run(folder: Path, *arguments: str, **changes: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the results that were written by job."""
    given = ["--out", str(folder), *arguments]
    code = run_part(replace(PART, **changes), arguments_of(PART, None).parse_args(given), given)
    path = folder / f"{PART.name}.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    return code, {result["job"]: result for result in results}


def only(*names: str) -> dict[str, Any]:
    return {"jobs": lambda options: list(names)}


def test_a_child_is_replaced_when_a_job_ends_or_spoils_it(tmp_path: Path) -> None:
    asked = ("one", "fail", "two", "exit", "three", "break", "four", "spoil", "five")
    code, found = run(tmp_path, **only(*asked))
    assert code == 1
    assert [found[job]["status"] for job in ("fail", "exit", "break")] == ["failed", "crashed", "failed"]
    assert found["fail"]["error"] == "ValueError: such a number"
    assert "ended with code 3" in found["exit"]["error"]
    assert "about to end" in found["exit"]["error"]
    assert found["spoil"]["status"] == "passed"
    pids = [found[job]["pid"] for job in ("one", "two", "three", "four", "five")]
    assert pids[0] == pids[1]  # a failure that leaves the device alone
    assert len(set(pids)) == 4
    assert found["four"]["pid"] == found["spoil"]["pid"]


def test_a_job_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "START_S", 0.0)
    _, found = run(tmp_path, "--in-process", **only("one"))  # writes what the next run finds
    _, found = run(tmp_path, **only("one", "hang"), job_s=3.0)
    assert (found["one"]["status"], found["hang"]["status"]) == ("passed", "timed out")


def answered(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Status and name of each job that was asked, in order."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return [f"{status} {job}" for status, job, *_ in lines if job in ("one", "two", "fail")]


def test_a_run_that_was_ended_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = only("one", "two", "fail")
    assert run(tmp_path, "--in-process", "--only", "one", **names)[0] == 0
    code, found = run(tmp_path, "--in-process", **names)
    assert (code, list(found)) == (1, ["one", "two", "fail"])
    assert answered(capsys) == ["passed one", "passed two", "failed fail"]
    run(tmp_path, "--in-process", **names)
    assert answered(capsys) == ["failed fail"]
    run(tmp_path, "--in-process", "--again", **names)
    assert "passed one" in answered(capsys)


def test_the_worst_case_decides_a_promise() -> None:
    def result(job: str, least: float | None, **reached: float) -> dict[str, Any]:
        return {"job": job, "status": "passed", "promises": {"norms": ["bandwidth", least]}, "reached": reached}

    [row] = promise_rows(
        [result("a", 0.8, bandwidth=0.9), result("b", 0.8, bandwidth=0.7), {"job": "c", "status": "skipped"}]
    )
    assert (row["status"], row["reached"], row["at"], row["cases"]) == ("missed", 0.7, "b", 2)
    assert promise_rows([result("a", 0.8, bandwidth=0.8)])[0]["status"] == "met"
    assert promise_rows([result("a", None, bandwidth=0.1)])[0]["status"] == "reported"
    assert promise_rows([result("a", 0.8, flex=0.1)])[0]["status"] == "not measured"
