"""How much CPU time a server without requests takes: each process of `transom serve`, in percent of one core.

    python benchmarks/idle_cpu.py [--model smollm2] [--seconds 60] [-- --haproxy]

Starts a server, sends a few requests so that nothing is new to it, waits until it is idle, and reads every process's CPU time
before and after. Arguments behind `--` go to `transom serve`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from served import Served, name_of, serving, wait_until_ready

NUM_REQUESTS = 4
SETTLE_S = 15.0  # Serve's start-up work is over by then


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=SETTLE_S)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    with serving(options.model, options.flags) as server:
        wait_until_ready(server)
        for _ in range(NUM_REQUESTS):
            httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 8}, timeout=60, trust_env=False
            )
        time.sleep(options.settle)
        shares, rss = idle_shares(server, options.seconds)
    rows = [{"process": name, "percent": 100 * share, "rss_mb": rss[name]} for name, share in shares.most_common()]
    for row in rows:
        print(f"{row['process']:40} {row['percent']:6.2f} % {row['rss_mb']:8.0f} MB")
    print(f"{'everything together':40} {100 * shares.total():6.2f} % {sum(rss.values()):8.0f} MB")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def idle_shares(server: Served, seconds: float) -> tuple[Counter[str], dict[str, float]]:
    """The share of one core that each kind of process takes in so many seconds, and its resident memory in MB."""
    processes = server.processes()
    before, begin_s = {one.pid: cpu_s(one) for one in processes}, time.perf_counter()
    time.sleep(seconds)
    elapsed_s = time.perf_counter() - begin_s
    shares: Counter[str] = Counter()
    rss: dict[str, Any] = {}
    for one in server.processes():
        name = name_of(one)
        shares[name] += (cpu_s(one) - before.get(one.pid, 0.0)) / elapsed_s
        rss[name] = rss.get(name, 0.0) + one.memory_info().rss / 1e6
    return shares, rss


def cpu_s(process: psutil.Process) -> float:
    """User and system time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
