"""Which services of Ray a server starts, and the scripts that stand in their places."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray._private import node, parameter, services

from transom_cluster.commands import ray_services
from transom_cluster.commands.ray_services import needed_services, raylet_command

NODE = "0b1a88"
AGENT = [sys.executable, "-u", "/some where/agent.py", "--port=7"]


def command(folder: Path) -> list[str]:
    return [
        "/ray/raylet",
        f"--session_dir={folder}",
        f"--node_id={NODE}",
        "--static_resource_list=node:1.2.3.4,1.0,CPU,2",
        "--head",
        "--num_prestart_python_workers=64",
        f"--dashboard_agent_command={subprocess.list2cmdline(AGENT)}",
        f"--runtime_env_agent_command={subprocess.list2cmdline(AGENT)}",
    ]


def flags(given: list[str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in given if "=" in part)


def test_a_raylet_starts_scripts_in_place_of_its_agents_and_few_processes_at_once(tmp_path: Path) -> None:
    given = command(tmp_path)
    changed = raylet_command(given)
    assert [part.split("=")[0] for part in changed] == [part.split("=")[0] for part in given]
    assert changed[:5] == given[:5]
    assert flags(changed)["--num_prestart_python_workers"] == str(ray_services.NUM_PRESTARTED)
    for name in ("--dashboard_agent_command", "--runtime_env_agent_command"):
        assert shlex.split(flags(changed)[name])[:2] == ["/bin/sh", "-c"]


def test_the_script_reports_no_service_and_ends_with_the_raylet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_services, "LOOK_S", 0.05)
    folder = tmp_path / "a session"
    folder.mkdir()
    script = shlex.split(flags(raylet_command(command(folder)))["--dashboard_agent_command"])
    raylet = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()", *script],
        stderr=subprocess.DEVNULL,
    )
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
    wait_for(lambda: all((folder / f"{name}_{NODE}").exists() for name in names))
    wait_for(lambda: {(folder / f"{name}_{NODE}").read_text() for name in names} == {"-1"})
    (shell,) = [one for one in psutil.Process(raylet.pid).children() if one.name() == "sh"]
    raylet.kill()
    raylet.wait()
    shell.wait(60)


def test_the_other_agent_starts_later_with_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_services, "AGENT_DELAY_S", 0)
    written = tmp_path / "written $HOME"
    agent = [sys.executable, "-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('it ran')", str(written)]
    given = [*command(tmp_path)[:-1], f"--runtime_env_agent_command={shlex.join(agent)}"]
    script = shlex.split(flags(raylet_command(given))["--runtime_env_agent_command"])
    subprocess.run(script, check=True, timeout=60)
    assert written.read_text() == "it ran"


def test_ray_is_as_before_afterwards() -> None:
    def functions() -> list[object]:
        names = ("start_monitor", "start_api_server", "start_log_monitor")
        init = parameter.RayParams.__init__
        return [*(getattr(node.Node, name) for name in names), services.start_ray_process, init]

    before = functions()
    with needed_services(agent_port=12345):
        assert not set(functions()) & set(before)
        assert parameter.RayParams(num_cpus=1).runtime_env_agent_port == 12345
    assert functions() == before


def wait_for(condition: object) -> None:
    end_s = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.01)
