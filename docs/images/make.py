#!/usr/bin/env python3
"""Take the README's pictures of a running server: the live block map, and a Grafana dashboard. `plots.py` draws the plots.

    .venv/bin/python docs/images/make.py [block_map] [dashboard]

Chromium takes each picture from the real page, of `transom serve` with the demo model and conversations. `dashboard` also needs
npm, for Grafana's panel components, and Debian's Prometheus (`make setup` fetches it).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml
from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
DASHBOARD = ROOT / "dashboards/json/transom-kv-cache.json"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAX_BYTES = 150_000
PICTURES = ("block_map", "dashboard")
MODEL_FLAGS = ("--window", "256", "--sinks", "4", "--window-pattern", "SSF", "--kv-cache-memory-bytes", "40MiB")
NUM_SESSIONS = 5
TURN_TOKENS = 24
TRAFFIC_S = 150.0
BLOCK_MAP_AFTER_S = 60.0
START_TIMEOUT_S = 240.0
SIZE = {"width": 1200, "height": 700}


def main() -> None:
    """Make the pictures that are named, or all of them."""
    names = sys.argv[1:] or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        sys.exit(f"unknown pictures {sorted(unknown)}; choose from {', '.join(PICTURES)}.")
    with browser() as chromium, tempfile.TemporaryDirectory() as temporary:
        live_pictures(chromium, Path(temporary), names)


def live_pictures(chromium: Browser, folder: Path, names: list[str]) -> None:
    """Pictures of a server under load."""
    panels = build_panels() if "dashboard" in names else None
    with server(folder) as url, prometheus(folder, url) as prometheus_url:
        begin_s = time.monotonic()
        with traffic(url):
            time.sleep(BLOCK_MAP_AFTER_S)
            if "block_map" in names:
                block_map(chromium, url)
            if panels is not None:
                time.sleep(max(0.0, begin_s + TRAFFIC_S - time.monotonic()))
                dashboard(chromium, panels, prometheus_url)


def block_map(chromium: Browser, url: str) -> None:
    """The live page, after some frames."""
    page = chromium.new_page(viewport=SIZE, color_scheme="dark")
    page.goto(f"{url}/blocks")
    page.wait_for_selector("#status[data-kind=live]")
    page.wait_for_function("() => transomBlockMap.stopwatch.numFrames >= 20")
    save(page, "block_map")


def dashboard(chromium: Browser, panels: Path, prometheus_url: str) -> None:
    """The upper part of the dashboard."""
    with panel_server(panels, prometheus_url) as url:
        page = chromium.new_page(viewport=SIZE)
        page.goto(f"{url}/?seconds={TRAFFIC_S:.0f}")
        page.wait_for_function("() => document.title === 'ready'", timeout=120_000)
        page.wait_for_timeout(1_000)  # Grafana's plots draw themselves after their first layout
        save(page, "dashboard")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """The Chromium on PATH; Playwright's own downloads are not used."""
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        sys.exit("No Chromium on PATH; on Debian: apt-get install chromium.")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


def save(page: Any, name: str, **options: Any) -> None:
    """Write a picture; exit if it is too large for a README."""
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path, **options)
    page.close()
    size_bytes = path.stat().st_size
    if size_bytes > MAX_BYTES:
        sys.exit(f"{path.name} has {size_bytes} bytes; the limit is {MAX_BYTES}. Make the window smaller.")
    print(f"{path.relative_to(ROOT)}: {size_bytes} bytes")


@contextlib.contextmanager
def running(command: list[str], log: Path, stop: signal.Signals = signal.SIGTERM) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in a file, ended on leaving."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(stop)
        process.wait(60)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """`transom serve` with windows and sinks and a small pool."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "transom"), "serve", "smollm2", "--port", str(port), *MODEL_FLAGS]
    with running(command, folder / "serve.log", signal.SIGINT) as process:
        wait_until(
            lambda: httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200, process, folder / "serve.log"
        )
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def prometheus(folder: Path, url: str) -> Iterator[str]:
    """Prometheus over the server's page of metrics."""
    program = subprocess.run([ROOT / "scripts/prometheus", "prometheus"], capture_output=True, text=True, check=True)
    port, config = free_port(), folder / "prometheus.yml"
    job = {"job_name": "transom", "static_configs": [{"targets": [url.removeprefix("http://")]}]}
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "5s"}, "scrape_configs": [job]}))
    command = [
        program.stdout.strip(),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, folder / "prometheus.log") as process:
        ready = f"http://127.0.0.1:{port}/-/ready"
        wait_until(lambda: httpx.get(ready).status_code == 200, process, folder / "prometheus.log")
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def traffic(url: str) -> Iterator[None]:
    """Conversations that take turns, until the caller leaves."""
    ended = threading.Event()
    threads = [threading.Thread(target=converse, args=(url, index, ended)) for index in range(NUM_SESSIONS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def converse(url: str, index: int, ended: threading.Event) -> None:
    """One user: a long system prompt that all share, and questions that come back with the whole conversation."""
    system = "You are a patient guide who answers in short sentences. " * 12
    while not ended.is_set():
        messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        for turn in range(6):
            question = f"Question {turn} of traveller {index}: what should I see along river number {turn * 7 + index}, and why? "
            messages.append({"role": "user", "content": question * 4})
            body = {"model": "smollm2", "messages": messages, "max_tokens": TURN_TOKENS, "temperature": 0.8}
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300.0)
            if ended.is_set() or response.status_code != 200:
                return
            messages.append({"role": "assistant", "content": response.json()["choices"][0]["message"]["content"]})
            ended.wait(0.5 * index)


def build_panels() -> Path:
    """The folder of the built page with Grafana's panel components."""
    work = ROOT / "build/grafana_panels"
    shutil.copytree(FOLDER / "grafana_panels", work, dirs_exist_ok=True)
    if not (work / "node_modules").exists():
        subprocess.run(["npm", "install", "--legacy-peer-deps", "--no-audit", "--no-fund"], cwd=work, check=True)
    subprocess.run(["npx", "vite", "build"], cwd=work, check=True)
    return work / "dist"


class PanelHandler(SimpleHTTPRequestHandler):
    """Serves the built page, the dashboard, and Prometheus under /prometheus/."""

    def __init__(self, *args: Any, prometheus_url: str, **options: Any) -> None:
        self._prometheus_url = prometheus_url
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        """Answer one request."""
        if self.path.startswith("/prometheus/"):
            with urllib.request.urlopen(self._prometheus_url + self.path.removeprefix("/prometheus")) as answer:
                self._send_json(answer.read())
        elif self.path == "/dashboard.json":
            self._send_json(json.dumps(json.loads(DASHBOARD.read_text())).encode())
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _send_json(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def panel_server(panels: Path, prometheus_url: str) -> Iterator[str]:
    """The panels' page on a port of its own."""
    handler = partial(PanelHandler, directory=str(panels), prometheus_url=prometheus_url)
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until(is_ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a process answers; exit with its log if it ends or takes too long."""
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if is_ready():
                return
        time.sleep(0.2)
    sys.exit(f"A process did not start:\n{log.read_text()}")


if __name__ == "__main__":
    main()
