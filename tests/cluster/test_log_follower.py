"""What processes write into their files in JSON is shown once, whole lines only, and nothing else."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from transom_cluster.commands import log_follower
from transom_cluster.commands.log_follower import LogFollower

LINE = '{"time": "2026-01-01T00:00:00.000Z", "message": "%s"}\n'


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogFollower:
    monkeypatch.setattr(log_follower, "PERIOD_S", 3600.0)
    return LogFollower(tmp_path, io.StringIO())


def test_lines_of_all_files_once(tmp_path: Path, follower: LogFollower) -> None:
    one, other = tmp_path / "worker-1.err", tmp_path / "worker-2.err"
    one.write_text(LINE % "a" + "Traceback of somebody\n" + LINE % "b" + LINE[:20])
    (tmp_path / "raylet.err").write_text(LINE % "not ours")
    follower._show()
    with one.open("a") as file:
        file.write(LINE[20:] % "c")
    other.write_text(LINE % "d")
    follower.close()
    follower.close()
    assert follower._out.getvalue() == "".join(LINE % name for name in "abcd")


def test_a_line_without_an_end_does_not_stop_it(
    tmp_path: Path, follower: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follower, "MAX_READ_BYTES", 100)
    (tmp_path / "worker-1.err").write_text("x" * 1000 + "\n" + LINE % "a")
    follower.close()
    assert follower._out.getvalue() == LINE % "a"


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    out = io.StringIO()
    LogFollower(tmp_path / "missing", out).close()
    assert out.getvalue() == ""


def test_an_output_that_is_closed(tmp_path: Path) -> None:
    """The thread ends without an error: pyproject.toml makes an exception in a thread fail its test."""
    out = ClosedOutput()
    (tmp_path / "worker-1.err").write_text(LINE % "a")
    LogFollower(tmp_path, out).close()
    assert out.num_writes == 1


class ClosedOutput(io.StringIO):
    """An output that is closed, and counts the writes that it refuses."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        raise ValueError("I/O operation on closed file")
