"""`make monitor`: a real Prometheus over a page like a router's, a stand-in for Grafana, and nothing left after Ctrl-C. What it
makes of the address and the keys that it is given, and which Grafana it starts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from scripts.monitor_settings import CannotStart, first_key, grafana_command, prometheus_configuration
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.end_to_end.server import HTTP, PATIENCE_S, look_until
from tests.free_ports import free_port
from tests.loopback_server import served
from tests.prometheus_programs import prometheus_program

ROOT = Path(__file__).parents[2]
KEY = "a-key-of-thirty-two-characters-xx"
PAGE = b'# TYPE transom_router_workers gauge\ntransom_router_workers{model="m",router="r",state="open"} 1\n'
GRAFANA = """#!{python}
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        prefixes = ("GF_", "TRANSOM_", "PROMETHEUS_", "SCRAPE_")
        wanted = {{name: value for name, value in os.environ.items() if name.startswith(prefixes)}}
        self.wfile.write(json.dumps([sys.argv[1:], wanted]).encode())
http.server.HTTPServer((os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def router() -> Iterator[str]:
    async def page(request: Request) -> Response:
        is_known = request.headers.get("authorization") == f"Bearer {KEY}"
        return Response(PAGE if is_known else b"", 200 if is_known else 401)

    app = Starlette(routes=[Route("/{path:path}", page)])
    with served(app, timeout_graceful_shutdown=0) as (port, _):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def prometheus() -> None:
    prometheus_program("prometheus")


def monitor(*arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    command = [sys.executable, "-m", "scripts.monitor", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def output_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError("".join(lines) + process.communicate()[1])


def value_when_there(url: str, query: str) -> Any:
    """What the first scrape brings; it comes within the scrape interval of 5 s."""

    def series() -> list[Any]:
        found: list[Any] = HTTP.get(f"{url}/api/v1/query", params={"query": query}).json()["data"]["result"]
        return found

    return look_until(series, bool)[0]["value"][1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("prometheus")
def test_it_starts_both_and_leaves_nothing_behind(router: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\n{KEY}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "grafana").write_text(GRAFANA.format(python=sys.executable))
    (programs / "grafana").chmod(0o755)
    port, grafana_port = free_port(), free_port()
    process = monitor(
        *("--url", router, "--api-key-file", str(keys), "--data", str(tmp_path / "data")),
        *("--port", str(port), "--grafana-port", str(grafana_port)),
        path=programs,
    )
    try:
        said = output_until(process, "Ctrl-C")
        base, grafana = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{grafana_port}"
        assert base in said
        assert f"{grafana}/d/transom-overview" in said
        assert value_when_there(base, 'transom_router_workers{state="open"}') == "1"
        rules = HTTP.get(f"{base}/api/v1/rules").json()["data"]["groups"]
        assert {group["name"] for group in rules} >= {"transom-service", "transom-workers", "transom-cache"}
        arguments, settings = HTTP.get(f"{grafana}/api/health").json()
        assert arguments[:1] == ["server"]
        assert settings["PROMETHEUS_URL"] == base
        assert settings["SCRAPE_INTERVAL"] == "5s"
        assert (Path(settings["TRANSOM_DASHBOARDS"]) / "transom-overview.json").exists()
        assert (Path(settings["GF_PATHS_PROVISIONING"]) / "dashboards/transom.yml").exists()
        assert (tmp_path / "data/prometheus.yml").stat().st_mode & 0o077 == 0
    finally:
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, ""), rest
    for url in (base, grafana):
        with pytest.raises(httpx.ConnectError):
            HTTP.get(url)


@pytest.mark.usefixtures("prometheus")
def test_a_port_that_is_taken_is_named(router: str, tmp_path: Path) -> None:
    """The router's own port stands for one that is taken. It answers 401, which is not ready."""
    process = monitor("--url", router, "--port", router.rpartition(":")[2], "--data", str(tmp_path))
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "address already in use" in errors
    assert "answers 401. Give the server's keys with --api-key-file." in errors


@pytest.mark.parametrize(
    ("url", "job"),
    [
        ("http://127.0.0.1:8000", ("http", "127.0.0.1:8000", "/metrics")),
        ("https://llm.example/", ("https", "llm.example", "/metrics")),
        ("https://llm.example/inner/llm/", ("https", "llm.example", "/inner/llm/metrics")),
    ],
)
def test_the_address_may_have_a_prefix(url: str, job: tuple[str, str, str]) -> None:
    (made,) = yaml.safe_load(prometheus_configuration(url, ""))["scrape_configs"]
    ((address,),) = [targets["targets"] for targets in made["static_configs"]]
    assert (made["scheme"], address, made["metrics_path"]) == job
    assert "authorization" not in made


def test_keys_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name, problem in (("gone", "cannot be read"), ("empty", "has no key")):
        with pytest.raises(CannotStart, match=problem):
            first_key(tmp_path / name)


def test_an_older_grafana_is_started_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/defaults.ini").touch()
    program = tmp_path / "bin/grafana-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert grafana_command() == [str(program), "--homepath", str(tmp_path)]
    program.unlink()
    assert grafana_command() is None
