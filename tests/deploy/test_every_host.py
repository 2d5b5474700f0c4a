"""`every_host.py`, which the head runs for every worker host, with stand-ins for ssh, rsync and ray that record their calls."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from deploy.node import every_host

CONFIG = {
    "provider": {"type": "local", "head_ip": "192.0.2.10", "worker_ips": ["192.0.2.11", "192.0.2.12"]},
    "auth": {"ssh_user": "ubuntu", "ssh_private_key": "/keys/id"},
    "worker_setup_commands": ["set up"],
    "worker_start_ray_commands": ["start ray"],
}
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> {calls}
case "$*" in *192.0.2.12*) [ ! -e {broken} ] || {{ echo "no route to host" >&2; exit 255; }} ;; esac
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with its cluster's YAML and the stand-ins; `no_app` instead of ending Serve."""
    for name in ("ssh", "rsync", "bash"):
        program = tmp_path / name
        program.write_text(STAND_IN.format(calls=tmp_path / "calls", broken=tmp_path / "broken"))
        program.chmod(0o755)
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(every_host, "CONFIG", tmp_path / "config.yaml")
    monkeypatch.setattr(every_host, "end_app", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return every_host


def calls(tmp_path: Path) -> list[str]:
    """Sorted, since workers are seen to side by side."""
    return sorted((tmp_path / "calls").read_text().splitlines())


def test_stop_reaches_the_head_and_every_worker(hosts: ModuleType, tmp_path: Path) -> None:
    assert hosts.main("stop") == 0
    head, one, two = calls(tmp_path)
    assert head == f"bash -c {hosts.STOP}"
    assert one.endswith(f"-i /keys/id ubuntu@192.0.2.11 {hosts.STOP}")
    assert two.endswith(f"-i /keys/id ubuntu@192.0.2.12 {hosts.STOP}")


def test_update_copies_and_sets_up(hosts: ModuleType, tmp_path: Path) -> None:
    assert hosts.main("update") == 0
    copies, setups = calls(tmp_path)[:2], calls(tmp_path)[2:]
    assert all("rsync -a --delete" in call and call.endswith(":transom/") for call in copies)
    assert all(call.endswith("set up") for call in setups)
    assert len(setups) == 2


def test_rejoin_starts_ray_where_it_is_missing(
    hosts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "alive", lambda: {"192.0.2.10", "192.0.2.11"})
    assert hosts.main("rejoin") == 0
    assert not any("192.0.2.11" in call for call in calls(tmp_path))
    assert any(call.endswith("192.0.2.12 export RAY_HEAD_IP=192.0.2.10; start ray") for call in calls(tmp_path))


def test_a_worker_that_fails_is_named_and_the_others_are_done(
    hosts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").touch()
    assert hosts.main("stop") == 1
    assert capsys.readouterr().out == "192.0.2.12: no route to host\n"
    assert any("192.0.2.11" in call for call in calls(tmp_path))
