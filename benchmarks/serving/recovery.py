"""How long streams pause when what computes them is killed: a real server, some streams, a kill, and each stream's pause by phase.

    python -m benchmarks.serving.recovery [--kill worker|rank|rank-twice] [--workers 2] [--streams 8] [--rounds 3]

A round starts a server, waits until all streams have begun, and kills a worker, or a rank of one; `rank-twice` kills another rank
as soon as the ranks start again. Then it reads the timeline of each stream that was lost (`/debug/requests/{id}`). With one worker
the streams wait for its restart. The phases of a pause, in order:

    detect     from the kill until the router knows that the stream is lost
    place      until the router has chosen a worker: quarantine, cooldown, restart of the ranks
    submit     until that worker has accepted the stream
    queue      until the stream is in a step of that worker
    recompute  until the first new token: the prompt and the output so far are computed again
    deliver    the rest, until the client has the token

`without` is the pause without `recompute` and `queue`: what failover itself adds to the model's own time. docs/failover.md has the
last figures.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from benchmarks.server_process import Server, start_server
from benchmarks.serving.process_names import processes_named
from tests.end_to_end.server import HTTP
from tests.end_to_end.streams import ask_all, bodies, items

PHASES = ("detect", "place", "submit", "queue", "recompute", "deliver")


def one_round(server: Server, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run streams, kill, and return the phases of each stream that was lost."""
    prompts = [f"{item} " + "a word and " * 20 for item in items(options.streams)]
    kills_s: list[float] = []

    def strike() -> None:
        kills_s.append(time.time())
        kill(server, options.kill)

    streams = asyncio.run(ask_all(server.url, bodies(prompts, max_tokens=80), strike))
    [kill_s] = kills_s
    for stream in streams:
        if stream.error is not None:
            print("  lost:", stream.error)
    reports = [(stream, HTTP.get(f"{server.url}/debug/requests/{stream.request_id}").json()) for stream in streams]
    lost = [(s, report) for s, report in reports if any(step["what"] == "lost" for step in report.get("steps", []))]
    return [phases(report["steps"], longest_pause_s(stream.chunks_s, kill_s), kill_s) for stream, report in lost]


def longest_pause_s(chunks_s: Sequence[float], kill_s: float) -> float:
    """The longest time without a chunk after the kill."""
    times = [kill_s, *(at_s for at_s in chunks_s if at_s > kill_s)]
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def kill(server: Server, kind: str) -> None:
    """Kill the first process of a kind that runs, and with `rank-twice` the first rank that starts after it."""
    before = processes_named(server, kind.removesuffix("-twice"))
    before[0].kill()
    while kind == "rank-twice":
        time.sleep(0.02)
        if new := [one for one in processes_named(server, "rank") if one not in before]:
            new[0].kill()
            return


def phases(steps: Sequence[dict[str, Any]], pause_s: float, kill_s: float) -> dict[str, float]:
    """The seconds of each phase, from the steps of a request's timeline."""
    ends = {"lost": "detect", "placed": "place", "accepted": "submit", "admitted": "queue", "first_token": "recompute"}
    spent = dict.fromkeys(PHASES, 0.0)
    last_s, is_lost = kill_s, False
    for step in steps:
        at_s = datetime.fromisoformat(step["at"]).timestamp()
        is_lost = is_lost or (step["what"] == "lost" and at_s > kill_s)
        if is_lost and step["what"] in ends:
            spent[ends[step["what"]]] += max(0.0, at_s - last_s)
            last_s = max(at_s, last_s)
            is_lost = step["what"] != "first_token"
    spent["deliver"] = max(0.0, pause_s - sum(spent.values()))
    return {**spent, "pause": pause_s, "without": pause_s - spent["queue"] - spent["recompute"]}


def run_server(options: argparse.Namespace) -> list[dict[str, float]]:
    """One round."""
    settings = {
        "replicas": options.workers,
        "tensor_parallel_size": 1 if options.kill == "worker" else 2,
        "dtype": "float32",
        "kv_cache_memory_bytes": "256MiB",
    }
    with start_server("smollm2", **settings) as server:
        return one_round(server, options)


def show(pauses: Sequence[dict[str, float]]) -> None:
    """Print the median and the largest seconds of each phase."""
    print(f"{len(pauses)} streams lost")
    print("  " + "".join(f"{column:>11}" for column in ("", *PHASES, "pause", "without")))
    for label, of in (("median", statistics.median), ("largest", max)):
        values = [of([one[column] for one in pauses]) for column in (*PHASES, "pause", "without")]
        print("  " + f"{label:>11}" + "".join(f"{value:>11.3f}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", choices=("worker", "rank", "rank-twice"), default="worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pauses: list[dict[str, float]] = []
    for number in range(options.rounds):
        found = run_server(options)
        pauses += found
        print(f"round {number + 1}:", " ".join(f"{one['pause']:.2f}" for one in found), flush=True)
    if pauses:
        show(pauses)


if __name__ == "__main__":
    main()
