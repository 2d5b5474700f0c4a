"""What `transom serve` sets for the processes of Ray (names that the required version of Ray reads), and how it shows their log
lines: each JSON line of their files once, whole lines only, and no other lines."""

from __future__ import annotations

import inspect
import io
import re
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.serve._private import constants

from tests.deploy.deploy_files import DEPLOY
from transom_cluster.commands.local_ray import (
    _ENVIRONMENT,
    JEMALLOC_SETTINGS,
    LocalRay,
    StartFailed,
    _allocator,
    _as_start_failure,
)
from transom_cluster.commands.log_follower import LogFollower
from transom_core.settings.settings import Settings


def test_serve_reads_every_setting_of_serve() -> None:
    source = inspect.getsource(constants)
    names = [*_ENVIRONMENT, *(haproxy := LocalRay(Settings.parse(model="m", haproxy=True))._haproxy_environment())]
    assert [name for name in names if name.startswith("RAY_SERVE_") and f'"{name}"' not in source] == []
    assert haproxy["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == "60"  # for half-sent requests


def test_ray_allocates_by_jemalloc_unless_something_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    library = Path(ray.__file__).parent / "core/libjemalloc.so"
    expected = {"LD_PRELOAD": str(library), "MALLOC_CONF": JEMALLOC_SETTINGS} if library.exists() else {}
    assert _allocator() == expected
    monkeypatch.setenv("LD_PRELOAD", "/own.so")
    assert _allocator() == {}
    files = [(DEPLOY / name).read_text() for name in ("Dockerfile", "node/env.sh")]
    assert all(f"MALLOC_CONF={JEMALLOC_SETTINGS}" in text for text in files)


class Handle:
    """Serve's handle of a deployment, which notes what is broadcast."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self._name, self._calls = name, calls

    def broadcast(self, method: str) -> Handle:
        self._calls.append((self._name, method))
        return self

    async def results_async(self, *, timeout_s: float) -> list[None]:
        assert timeout_s > 10  # an engine's 5 s, and its ranks' 5 s
        if self._name == "Worker-1":
            raise RuntimeError("it is dead")
        return [None]


def test_a_server_that_ends_stops_the_workers_of_every_group_where_there_is_a_disk_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, _app: Handle(name, calls))
    groups = ["role=prefill", "role=decode"]
    LocalRay(Settings.parse(model="m", worker_group=groups, swap_space=1)).write_caches()
    assert calls == []
    LocalRay(Settings.parse(model="m", worker_group=groups, disk_cache="/d")).write_caches()
    assert calls == [("Worker", "stop"), ("Worker-1", "stop"), ("Worker-2", "stop")]
    assert "could not be written to --disk-cache: RuntimeError('it is dead')" in caplog.text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a port is taken\nat haproxy.cfg:3", "a port is taken"),
        ("[NOTICE] 2.8\n[ALERT] no files", "[ALERT] no files"),
        ("", "OSError"),
    ],
)
def test_a_failed_start_names_its_cause_in_one_line(text: str, line: str) -> None:
    """Ray's own text of an error in a task begins with the task and its process."""
    failed = RuntimeError("ray::HAProxyManager.ready() (pid=7)")
    failed.cause = OSError(text)  # type: ignore[attr-defined]
    with (
        pytest.raises(StartFailed, match=f"^Serve could not be started: {re.escape(line)}$"),
        _as_start_failure("Serve"),
    ):
        raise failed


LINE = '{"time": "2026-01-01T00:00:00.000Z", "message": "%s"}\n'
NEVER_S = 3600.0


def test_lines_of_all_files_appear_once(tmp_path: Path) -> None:
    one, other = tmp_path / "worker-1.err", tmp_path / "worker-2.err"
    one.write_text(LINE % "a" + "Traceback of a library\n" + LINE % "b" + LINE[:20])
    (tmp_path / "raylet.err").write_text(LINE % "a file of Ray itself")
    out = io.StringIO()
    LogFollower(tmp_path / "missing", out).close()
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


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_closed_output_ends_the_thread_without_an_error(tmp_path: Path) -> None:
    closed = io.StringIO()
    closed.close()
    (tmp_path / "worker-1.err").write_text(LINE % "a")
    LogFollower(tmp_path, closed).close()
