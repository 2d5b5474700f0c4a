"""A real Prometheus on loopback."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.server_process import ServerProcess
from tests.end_to_end.server import HTTP
from tests.free_ports import free_port

START_S = 120.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running one."""

    url: str

    def query(self, expression: str, *, at_s: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query, now or as they were then."""
        params: dict[str, str | float] = {"query": expression, **({} if at_s is None else {"time": at_s})}
        answer = HTTP.get(f"{self.url}/api/v1/query", params=params).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def value(self, expression: str, *, at_s: float | None = None) -> float:
        """The sum of an instant query's series, 0 without any."""
        return sum(float(series["value"][1]) for series in self.query(expression, at_s=at_s))

    def get(self, path: str) -> Any:
        """The data of another part of its API."""
        answer = HTTP.get(f"{self.url}/api/v1/{path}").json()
        assert answer["status"] == "success", answer
        return answer["data"]


@contextlib.contextmanager
def prometheus(program: str, folder: Path, job: dict[str, Any], *, rules: Path) -> Iterator[Prometheus]:
    """One that waits for a page as long as our own configuration does, with alert rules looked at every second."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "4s", "scrape_timeout": "4s", "evaluation_interval": "1s"},
        "scrape_configs": [job],
        "rule_files": [str(rules)],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = Prometheus(f"http://127.0.0.1:{port}")

    def is_ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return HTTP.get(f"{server.url}/-/ready").status_code == 200
        return False

    with ServerProcess(command) as process:
        process.wait_until(is_ready, START_S)
        yield server
