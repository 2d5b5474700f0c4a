"""How long a server takes from its command to the first generated token, and what takes the time.

    python benchmarks/start_time.py [--model smollm2] [--rounds 3] [--json FILE] [-- --haproxy]

Each round starts `transom serve`, asks for one token until an answer comes, and ends the server. Printed are the stages that the
server itself reports, and each process's start and CPU time until then: where all of them share two cores, the sum of their CPU
time matters. Arguments behind `--` go to `transom serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from served import PATIENCE_S, Served, name_of, serving

LOOK_S = 0.03
STAGE = re.compile(r"^  (.+): ([\d.]+) s$", re.MULTILINE)


class ProcessWatch:
    """Notes, on a thread, when each process of a server was first seen and how much CPU time it has used."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._seen_s: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._cpu_s: dict[int, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> list[dict[str, Any]]:
        """Stop, and return one row for each process, in the order of their starts."""
        self._closed.set()
        self._thread.join()
        return [
            {"process": self._names[pid], "start_s": seen_s, "cpu_s": self._cpu_s[pid]}
            for pid, seen_s in sorted(self._seen_s.items(), key=lambda item: item[1])
        ]

    def _run(self) -> None:
        while True:
            for process in self._server.processes():
                with contextlib.suppress(psutil.Error):
                    self._look(process)
            if self._closed.wait(LOOK_S):
                return

    def _look(self, process: psutil.Process) -> None:
        self._seen_s.setdefault(process.pid, time.perf_counter() - self._server.begin_s)
        self._names[process.pid] = name_of(process)  # Ray gives a process its actor's name after a while
        times = process.cpu_times()
        self._cpu_s[process.pid] = times.user + times.system


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    rounds = [measure(options.model, options.flags) for _ in range(options.rounds)]
    print("first token after, s:", ", ".join(f"{one['first_token_s']:.1f}" for one in rounds))
    print_table(rounds)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=2) + "\n")


def measure(model: str, flags: list[str]) -> dict[str, Any]:
    """One start."""
    with serving(model, flags) as server:
        watch = ProcessWatch(server)
        first_token_s = wait_for_token(server) - server.begin_s
        processes = watch.close()
        while "Press Ctrl-C" not in server.log.read_text():
            time.sleep(LOOK_S)
        stages = {name: float(seconds) for name, seconds in STAGE.findall(server.log.read_text())}
    return {"first_token_s": first_token_s, "stages_s": stages, "processes": processes}


def wait_for_token(server: Served) -> float:
    """The time when the first token came (`time.perf_counter`); raises RuntimeError when the server ends or none comes."""
    end_s = time.monotonic() + PATIENCE_S
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        while time.monotonic() < end_s and server.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1, "temperature": 0})
                if answer.status_code == 200:
                    return time.perf_counter()
            time.sleep(LOOK_S)
    raise RuntimeError(f"The server gave no answer:\n{server.log.read_text()[-4000:]}")


def print_table(rounds: list[dict[str, Any]]) -> None:
    """Medians of the rounds: stages, then processes."""
    for stage in rounds[0]["stages_s"]:
        print(f"  {stage:45} {statistics.median(one['stages_s'].get(stage, 0.0) for one in rounds):6.1f} s")
    print(f"\n{'process':32} {'starts at, s':>12} {'CPU until the token, s':>24}")
    names = list(dict.fromkeys(row["process"] for one in rounds for row in one["processes"]))
    total_s = 0.0
    for name in names:
        starts = [row["start_s"] for one in rounds for row in one["processes"] if row["process"] == name]
        cpu_s = statistics.median(
            sum(row["cpu_s"] for row in one["processes"] if row["process"] == name) for one in rounds
        )
        total_s += cpu_s
        print(f"{name:32} {statistics.median(starts):12.1f} {cpu_s:24.2f}")
    print(f"{'all':32} {'':12} {total_s:24.2f}")


if __name__ == "__main__":
    main()
