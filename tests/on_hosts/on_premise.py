"""The cluster of the test: the shipped files of deploy/, filled in with the addresses and folders of the test's hosts."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.on_hosts.hosts import ADMIN, VENV, Host, Hosts

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-this-cluster"
API_KEY, ADMIN_KEY = "a-key-of-this-cluster", "a-key-of-its-admin"
HEAD = "head"
SMALL_STORE = "--object-store-memory=100000000"
CLUSTER_YAML = "on_premise/cluster.yaml"


class OnPremise:
    """Drives the real `ray up`, `ray exec` and `ray down` from the admin's host, as a person would."""

    def __init__(self, hosts: Hosts, workers: dict[str, str]) -> None:
        """`workers`: the arguments of `ray start` of each."""
        self._hosts = hosts
        self._ray_arguments = {HEAD: SMALL_STORE} | {name: f"{SMALL_STORE} {given}" for name, given in workers.items()}
        self._workers = list(workers)

    def prepare(self, name: str, *exports: str) -> None:
        """What an administrator has on each host: its own environment, with `exports`, and Ray's arguments."""
        folder = self._hosts[name].files / "etc/transom"
        folder.mkdir()
        # The host's environment is there already, and no package index is.
        lines = [
            f"export TRANSOM_VENV={VENV} PIP_NO_INDEX=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1",
            "export OMP_NUM_THREADS=1 RAY_DISABLE_IMPORT_WARNING=1 RAY_raylet_start_wait_time_s=240",
            f"export TRANSOM_RAY_ARGS='{self._ray_arguments[name]}'",
            *(f"export {export}" for export in exports),
        ]
        (folder / "host.sh").write_text("\n".join(lines) + "\n")

    def write_files(self, wheel: Path, model: Path) -> None:
        """The deploy folder on the admin's host, with what belongs to this cluster."""
        deploy = self._admin.files / "root/deploy"
        shutil.copytree(ROOT / "deploy", deploy)
        node = deploy / "node"
        shutil.copy(wheel, node)
        shutil.copy(ROOT / "constraints.txt", node)
        shutil.copytree(model, node / "model")
        (node / "auth_token").write_text(TOKEN)
        (node / "api_keys").write_text(API_KEY + "\n")
        (node / "admin_keys").write_text(ADMIN_KEY + "\n")
        _write(deploy / CLUSTER_YAML, self._filled_in(yaml.safe_load((deploy / CLUSTER_YAML).read_text())))

    def up(self) -> str:
        """`ray up`."""
        return self._on_admin(f"ray up -y --no-config-cache {CLUSTER_YAML}", timeout_s=180)

    def execute(self, command: str, *, timeout_s: float) -> str:
        """A command on the head, by `ray exec`."""
        return self._on_admin(f"ray exec {CLUSTER_YAML} '. ~/transom/env.sh; {command}'", timeout_s=timeout_s)

    def deploy(self, settings: dict[str, Any], deployments: list[dict[str, Any]]) -> str:
        """`serve deploy` of the shipped serve.yaml, reachable from outside the head, with these settings and deployment options."""
        path = self._admin.files / "root/deploy/serve.yaml"
        serve = yaml.safe_load(path.read_text())
        serve["http_options"]["host"] = "0.0.0.0"
        (app,) = serve["applications"]
        app["args"] |= {"api_key_file": "/root/transom/api_keys", "model": "/root/transom/model", **settings}
        app["deployments"] += deployments
        _write(path, serve)
        self._on_admin(f"ray rsync-up {CLUSTER_YAML} serve.yaml /root/serve.yaml", timeout_s=60)
        return self.execute("serve deploy ~/serve.yaml", timeout_s=120)

    def down(self) -> str:
        """The steps of the README."""
        stopped = self.execute("python ~/transom/every_host.py stop", timeout_s=180)
        return stopped + self._on_admin(f"ray down -y {CLUSTER_YAML}", timeout_s=60)

    @property
    def _admin(self) -> Host:
        return self._hosts[ADMIN]

    def _on_admin(self, command: str, *, timeout_s: float) -> str:
        environment = "RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 RAY_UP_enable_autoscaler_v2=0"
        return self._admin.run(f"cd deploy; {environment} {command}", timeout_s=timeout_s)

    def _filled_in(self, cluster: dict[str, Any]) -> dict[str, Any]:
        provider = {
            "type": "local",
            "head_ip": self._hosts.address(HEAD),
            "worker_ips": [self._hosts.address(name) for name in self._workers],
        }
        return cluster | {"provider": provider, "auth": cluster["auth"] | {"ssh_user": "root"}}


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(document, sort_keys=False))
