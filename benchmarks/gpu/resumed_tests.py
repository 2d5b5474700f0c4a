"""A pytest plugin with which a run that was ended goes on: tests that passed over the same sources are not run again.

TRANSOM_PASSED_TESTS names the file of those that passed: a line for the sources (`jobs.sources`), then a line for each test.
"""

import os
from pathlib import Path

import pytest

from benchmarks.gpu.jobs import sources

_passed: set[str] = set()
_path: Path | None = None  # in the process that writes the file; xdist has others


def pytest_configure(config: pytest.Config) -> None:
    """Read which tests have passed, and begin a new file if they did so over other sources."""
    global _path
    path = Path(os.environ["TRANSOM_PASSED_TESTS"])
    first, *names = path.read_text().splitlines() if path.exists() else [""]
    is_same = first == sources()
    _passed.clear()
    _passed.update(names if is_same else ())
    _path = None if hasattr(config, "workerinput") else path
    if _path is not None and not is_same:
        _path.write_text(sources() + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed."""
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in _passed])
    items[:] = [item for item in items if item.nodeid not in _passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that passed."""
    if _path is not None and report.when == "call" and report.passed:
        with _path.open("a") as file:
            file.write(report.nodeid + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Count it as a success if all tests had passed before."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _passed:
        session.exitstatus = pytest.ExitCode.OK
