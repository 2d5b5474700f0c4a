"""How long streams pause when what computes them is killed: a real server, some streams, a kill, and each stream's pause by phase.

    python benchmarks/recovery_time.py [--kill worker|rank|rank-twice] [--streams 8] [--rounds 3] [--tree PATH ...]

A round starts a server with two workers, waits until all streams have begun, and kills a worker, or a rank of one. Then it reads
the timeline of each stream that was lost (`/debug/requests/{id}`). The phases of a pause, in order:

    detect     from the kill until the router knows that the stream is lost
    place      until the router has chosen a worker: quarantine, cooldown, restart of the ranks
    submit     until that worker has accepted the stream
    queue      until the stream is in a step of that worker
    recompute  until the first new token: the prompt and the output so far are computed again
    deliver    the rest, until the client has the token

A stream that is lost twice has both losses in its sums. `without` is the pause without `recompute` and `queue`: what failover
itself adds to the model's own time. `--tree` names source trees, such as checkouts of two commits: their servers run in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from served import Served, name_of, serving, wait_until_ready

PHASES = ("detect", "place", "submit", "queue", "recompute", "deliver")
BEGUN_CHUNKS = 8
PATIENCE_S = 240.0


@dataclass(slots=True)
class Stream:
    """One streamed completion: its id, and when each chunk came, in seconds since the epoch."""

    request_id: str = ""
    chunks_s: list[float] = field(default_factory=list)
    error: dict[str, Any] | None = None

    def pause_s(self, kill_s: float) -> float:
        """The longest time without a chunk after the kill."""
        times = [kill_s, *(at_s for at_s in self.chunks_s if at_s > kill_s)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


async def ask(client: httpx.AsyncClient, index: int, options: argparse.Namespace, stream: Stream) -> None:
    """Send one request, and read its answer into `stream`."""
    prompt = f"Item {index} of the list is " + "a word and " * (options.prompt_words // 3)
    body = {"prompt": prompt, "max_tokens": options.max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                stream.error = chunk.get("error", stream.error)
                stream.request_id = chunk.get("id", stream.request_id)
                stream.chunks_s.append(time.time())


async def one_round(server: Served, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run streams, kill, and return the phases of each stream that was lost."""
    streams = [Stream() for _ in range(options.streams)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
        asking = [asyncio.create_task(ask(client, i, options, stream)) for i, stream in enumerate(streams)]
        while any(len(stream.chunks_s) < BEGUN_CHUNKS for stream in streams):
            await asyncio.sleep(0.01)
        kill_s = time.time()
        kill_one(server, "worker" if options.kill == "worker" else "rank", options.signal)
        if options.kill == "rank-twice":
            await asyncio.sleep(options.pause_s)
            kill_one(server, "rank", options.signal)
        await asyncio.gather(*asking)
        for stream in streams:
            if stream.error is not None:
                print("  lost:", stream.error)
        reports = [(stream, (await client.get(f"/debug/requests/{stream.request_id}")).json()) for stream in streams]
    lost = [(s, report) for s, report in reports if any(step["what"] == "lost" for step in report.get("steps", []))]
    return [phases(report["steps"], stream.pause_s(kill_s), kill_s) for stream, report in lost]


def kill_one(server: Served, kind: str, number: int) -> None:
    """Kill the first process of a kind that runs."""
    victim = min((one for one in server.processes() if name_of(one) == kind), key=lambda one: one.pid)
    os.kill(victim.pid, number)


def phases(steps: Sequence[dict[str, Any]], pause_s: float, kill_s: float) -> dict[str, float]:
    """The seconds of each phase, from the steps of a request's timeline."""
    names = {"lost": "detect", "placed": "place", "accepted": "submit", "admitted": "queue", "first_token": "recompute"}
    spent = dict.fromkeys(PHASES, 0.0)
    last_s, is_lost = kill_s, False
    for step in steps:
        at_s = datetime.fromisoformat(step["at"]).timestamp()
        if step["what"] == "lost":
            if is_lost or at_s > kill_s:
                spent["detect" if last_s == kill_s else "place"] += max(0.0, at_s - last_s) if last_s == kill_s else 0.0
                last_s, is_lost = at_s, True
        elif is_lost and step["what"] in names:
            spent[names[step["what"]]] += max(0.0, at_s - last_s)
            last_s = max(at_s, last_s)
            is_lost = step["what"] != "first_token"
    spent["deliver"] = max(0.0, pause_s - sum(spent.values()))
    return {**spent, "pause": pause_s, "without": pause_s - spent["queue"] - spent["recompute"]}


def run_server(tree: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """One round with the server of a source tree."""
    paths = os.pathsep.join(str(tree / part) for part in ("cluster", "worker", "kernels"))
    flags = ["--replicas", "2", "--dtype", "float32", "--kv-cache-memory-bytes", "256MiB"]
    if options.kill != "worker":
        flags += ["--tensor-parallel-size", "2"]
    with serving(options.model, flags, environment={**os.environ, "PYTHONPATH": paths}) as server:
        try:
            wait_until_ready(server)
        except RuntimeError as error:  # on a busy machine Ray gives up
            print("no server:", str(error).splitlines()[-1])
            return []
        return asyncio.run(one_round(server, options))


def show(name: str, pauses: Sequence[dict[str, float]]) -> None:
    """Print the median and the largest seconds of each phase."""
    print(f"{name}: {len(pauses)} streams lost")
    print("  " + "".join(f"{column:>11}" for column in ("", *PHASES, "pause", "without")))
    for label, of in (("median", statistics.median), ("largest", max)):
        values = [of([one[column] for one in pauses]) for column in (*PHASES, "pause", "without")]
        print("  " + f"{label:>11}" + "".join(f"{value:>11.3f}" for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kill", choices=("worker", "rank", "rank-twice"), default="worker")
    parser.add_argument("--signal", type=int, default=signal.SIGKILL)
    parser.add_argument("--pause-s", type=float, default=6.0, help="between two kills")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", type=Path, action="append")
    options = parser.parse_args()
    trees = options.tree or [Path(__file__).parents[1]]
    pauses: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees:
            found = run_server(tree.resolve(), options)
            pauses[tree] += found
            print(
                f"round {number + 1}, {tree}:",
                " ".join(f"{one['pause']:.2f}" for one in sorted(found, key=lambda one: one["pause"])),
                flush=True,
            )
    for tree, found in pauses.items():
        if found:
            show(str(tree), found)


if __name__ == "__main__":
    main()
