"""`LogFollower` shows each JSON line of the processes' files once, whole lines only, and no other lines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from transom_cluster.commands.log_follower import LogFollower

LINE = '{"time": "2026-01-01T00:00:00.000Z", "message": "%s"}\n'
NEVER_S = 3600.0


def test_lines_of_all_files_appear_once(tmp_path: Path) -> None:
    one, other = tmp_path / "worker-1.err", tmp_path / "worker-2.err"
    one.write_text(LINE % "a" + "Traceback of a library\n" + LINE % "b" + LINE[:20])
    (tmp_path / "raylet.err").write_text(LINE % "a file of Ray itself")
    out = io.StringIO()
    follower = LogFollower(tmp_path, out, poll_period_s=NEVER_S)
    follower.show_new_lines()
    assert out.getvalue() == "".join(LINE % name for name in "ab")
    with one.open("a") as file:
        file.write(LINE[20:] % "c")
    other.write_text(LINE % "d")
    follower.close()
    follower.close()
    assert out.getvalue() == "".join(LINE % name for name in "abcd")


def test_an_overlong_line_is_skipped(tmp_path: Path) -> None:
    out = io.StringIO()
    follower = LogFollower(tmp_path, out, poll_period_s=NEVER_S, max_read_bytes=100)
    (tmp_path / "worker-1.err").write_text("x" * 1000 + "\n" + LINE % "a")
    follower.close()
    assert out.getvalue() == LINE % "a"


def test_a_missing_folder_has_no_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    LogFollower(tmp_path / "missing", out).close()
    assert out.getvalue() == ""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_closed_output_ends_the_thread_without_an_error(tmp_path: Path) -> None:
    closed = io.StringIO()
    closed.close()
    (tmp_path / "worker-1.err").write_text(LINE % "a")
    LogFollower(tmp_path, closed).close()
