"""`transom serve`: starts a server on this machine, prints its address, and waits for a signal.

Ctrl-C stops the server at once. SIGTERM, and SIGHUP when its terminal is closed, stop it after the running requests have ended.
If there is a disk tier, the workers write their KV caches to it before they stop. A second signal stops the server at once in any
case.
"""

import contextlib
import signal
import time
from types import FrameType
from typing import Any

import httpx
import typer

from transom_cluster.commands.local_ray import LocalRay, StartFailed
from transom_cluster.commands.startup_progress import StartupProgress
from transom_cluster.http.api_keys import current_keys
from transom_cluster.serve.start_checks import check_start
from transom_core.config import ServerConfig
from transom_core.errors import TransomError
from transom_core.settings.settings import Settings

START_FAILED = 1  # exit code
INTERRUPTED = 130  # 128 + SIGINT, the exit code that shells use
READY_TIMEOUT_S = 60.0  # for a router to answer; the first response may take twice as long
HALF_SENT = (
    "Anyone who reaches this port may hold connections open by headers that never end. In production use --haproxy, or a reverse "
    "proxy with a limit of time for headers."
)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived: the server stops after the running requests have ended."""


def run_server(settings: Settings, given: dict[str, Any]) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP, and return the exit code.

    After the latter two the server waits for the running requests; a second signal stops it at once. `given` has the settings that
    the user gave, in the form that `build_app` takes.
    """
    begin_s = time.perf_counter()
    for number in ENDING_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` wants the server to stay
            signal.signal(number, _interrupt)
    is_serving = False
    cluster = LocalRay(settings)
    try:
        with StartupProgress() as progress:
            architecture = check_start(settings)
            cluster.start(given, progress)
            progress.stage("first response")
            writes_text = not architecture.num_labels
            workers = _wait_for_first_response(cluster, settings.server_config(), writes_text=writes_text)
        _print_welcome(cluster, settings, workers, time.perf_counter() - begin_s, writes_text=writes_text)
        is_serving = True
        cluster.wait()
        typer.echo("transom: a process of Ray has ended unexpectedly; start the server again.", err=True)
    except KeyboardInterrupt as reason:
        if is_serving:
            with contextlib.suppress(KeyboardInterrupt):
                if isinstance(reason, Terminated):
                    cluster.drain()
                cluster.write_caches()
        return 0 if is_serving else INTERRUPTED
    except (TransomError, StartFailed) as error:
        typer.echo(f"transom: {error}", err=True)
        return START_FAILED
    finally:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # another Ctrl-C must not interrupt `cluster.stop`
        if is_serving:
            with contextlib.suppress(OSError):  # the terminal is gone
                typer.echo("\nStopping.")
        cluster.stop()
    return START_FAILED


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _wait_for_first_response(cluster: LocalRay, config: ServerConfig, *, writes_text: bool) -> list[dict[str, Any]]:
    """Wait for a router, then for one generated token (an embedding, if the model is a classifier) of the model and of each LoRA
    adapter, and return the workers' descriptions of themselves.

    These requests count against the limits of the first key: if they exceed them, the other adapters are not tried.

    The router queues the request until there is a worker, and starts one if autoscaling has already stopped all idle workers.

    Raises:
        StartFailed: no router answered in time, or the first request failed.
    """
    keys = current_keys(config)
    headers = {b"authorization": f"Bearer {keys[0]}".encode()} if keys else {}
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    with httpx.Client(
        base_url=cluster.local_url, headers=headers, timeout=2 * READY_TIMEOUT_S, trust_env=False
    ) as client:
        while not _router_answers(client):
            if time.monotonic() > deadline_s:
                raise StartFailed(f"No router answered within {READY_TIMEOUT_S:.0f} s.")
            time.sleep(0.05)
        body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
        path = "/v1/completions"
        if not writes_text:
            path, body = "/v1/embeddings", {"input": "Hello"}
        for model in (config.served_model_name, *(name for name, _ in config.lora_modules)):
            try:
                response = client.post(path, json={"model": model, **body})
            except httpx.TransportError as error:
                raise StartFailed(f"The first request got no response: {type(error).__name__}: {error}") from error
            if response.status_code == 429:
                break
            if response.status_code != 200:
                raise StartFailed(f"The first request failed with status {response.status_code}: {response.text}")
        workers: list[dict[str, Any]] = client.get("/").json()["workers"]
    return [worker for worker in workers if worker["state"] == "open"]


def _router_answers(client: httpx.Client) -> bool:
    """Return whether a router answers /health. Before there is a router, Ray Serve's proxy answers, without a `status`."""
    try:
        return "status" in client.get("/health").json()
    except (httpx.TransportError, ValueError):
        return False


def _print_welcome(
    cluster: LocalRay, settings: Settings, workers: list[dict[str, Any]], start_s: float, *, writes_text: bool
) -> None:
    config = settings.server_config()
    url, key = cluster.local_url, ' -H "Authorization: Bearer $TRANSOM_API_KEY"' if current_keys(config) else ""
    path, message = "chat/completions", '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    if not writes_text:
        path, message = "embeddings", '{"input": "Why is the sky blue?"}'
    for line in (
        f"Transom serves {config.served_model_name} at {url} after {start_s:.1f} s.",
        *([f"{len(workers)} workers, each of them:"] if len(workers) > 1 else []),
        *(workers[0]["report"].splitlines() if workers else []),
        "",
        f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{message}'",
        "",
        *([HALF_SENT] if key and not config.haproxy else []),
        "Press Ctrl-C to stop.",
    ):
        print(line, flush=True)
