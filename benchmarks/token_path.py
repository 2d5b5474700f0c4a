"""What a streamed token costs between worker and client: CPU per token by process, and time added to a first token.

    python benchmarks/token_path.py [--haproxy] [--streams 64] [--tokens 400]

Real Ray Serve, router and proxy; the worker is `paced_worker.PacedWorker`, 20 tokens per second and stream, first token at once.
CPU is user and system time of every process of the private Ray while the streams run, less what the same processes use
idle in as much time. The load generator is a process of its own and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> Counter[str]:
    """CPU used so far by each kind of process below this one."""
    from transom_cluster.commands.process_tree import descendants_of

    used: Counter[str] = Counter()
    for process in descendants_of(os.getpid()):
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        ticks = sum(map(int, stat.rpartition(")")[2].split()[11:13]))
        used[kind_of(command)] += ticks * TICK_S
    return used


def kind_of(command: str) -> str:
    """A process's part in the token path."""
    for word, kind in (("PacedWorker", "worker"), ("Worker", "worker"), ("Router", "router"), ("haproxy", "proxy")):
        if f":{word}" in command or (word == "haproxy" and "haproxy" in command.lower()):
            return kind
    return "proxy" if "ProxyActor" in command else "rest of Ray"


def load(url: str, *, streams: int, requests: int, tokens: int) -> dict[str, Any]:
    """Run the load generator against the server; its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / "load.py"), url, "--concurrency", str(streams), "--warmup", "2"]
        command += ["--requests", str(requests), "--prompt-tokens", "32-32", "--output-tokens", f"{tokens}-{tokens}"]
        subprocess.run([*command, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def start(haproxy: bool) -> Any:
    """The private Ray with the real router and the paced worker."""
    from transom_cluster.commands.local_ray import LocalRay
    from transom_cluster.commands.startup_progress import StartupProgress
    from transom_core.settings.settings import Settings

    class Cluster(LocalRay):
        """Puts the paced worker in the worker's place; late, because Ray reads its environment when first imported."""

        def _start_serve(self, given: dict[str, Any]) -> None:
            from transom_cluster import app

            app.worker_deployment = lambda settings, resources: Paced()
            super()._start_serve(given)

    os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(HERE))
    cluster = Cluster(Settings.parse(model="smollm2", port=0, haproxy=haproxy))
    with StartupProgress() as progress:
        cluster.start({"model": "smollm2", "haproxy": haproxy}, progress)
    return cluster


class Paced:
    """Binds as the worker's deployment does, without its arguments."""

    def bind(self, *_: object, **__: object) -> Any:
        """The paced worker's node of the app."""
        from ray import serve

        from paced_worker import PacedWorker

        options = {"max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0.5}}
        return serve.deployment(PacedWorker, name="Worker", **options).bind()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--haproxy", action="store_true")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    cluster = start(options.haproxy)
    try:
        time.sleep(3)  # HAProxy reloads a moment after the replicas are up
        first = load(cluster.local_url, streams=1, requests=60, tokens=2)
        before, begin_s = cpu_seconds(), time.monotonic()
        load(cluster.local_url, streams=options.streams, requests=options.streams, tokens=options.tokens)
        busy, spent_s = cpu_seconds() - before, time.monotonic() - begin_s
        before = cpu_seconds()
        time.sleep(spent_s)
        idle = cpu_seconds() - before
    finally:
        cluster.stop()
    num_tokens = options.streams * options.tokens
    per_token_us = {kind: 1e6 * (busy[kind] - idle[kind]) / num_tokens for kind in sorted(busy)}
    path_us = sum(per_token_us.get(kind, 0.0) for kind in ("proxy", "router", "worker"))
    print(
        json.dumps({"haproxy": options.haproxy, "tokens_per_s": num_tokens / spent_s, "first_token": first}, indent=1)
    )
    print("CPU per streamed token, us:", {kind: round(us, 1) for kind, us in per_token_us.items()})
    print(f"proxy + router + worker: {path_us:.0f} us a token; all of Ray: {sum(per_token_us.values()):.0f} us")


if __name__ == "__main__":
    main()
