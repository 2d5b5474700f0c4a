"""Routing policies over HTTP on real workers: starts a server for each policy, and talks to it in sessions of several turns.

    python benchmarks/routing_http.py --policies kv,round_robin,power_of_two,least_tokens --json http.json
    python benchmarks/routing_http.py --url http://127.0.0.1:8000     # a server that runs already

All sessions share a system prompt. So many of them are open at once as `--concurrency` says; each sends its next turn, with the
answers that it got, when the last answer is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from load_answers import Summary, events, read_body, summarise
from load_client import LoadClient, RawAnswer

WORDS = (
    "river",
    "stone",
    "window",
    "garden",
    "paper",
    "silver",
    "morning",
    "letter",
    "engine",
    "harbour",
    "winter",
    "bridge",
)
SYSTEM_WORDS = 300
FIRST_TURN_WORDS = (40, 250)
TURN_WORDS = (10, 60)
START_S = 240.0


def main(
    policies: Annotated[
        str, typer.Option(help="A server is started for each.")
    ] = "kv,least_tokens,power_of_two,round_robin",
    url: Annotated[str, typer.Option(help="A running server instead.")] = "",
    model: Annotated[str, typer.Option()] = "smollm2",
    replicas: Annotated[int, typer.Option(min=1)] = 3,
    sessions: Annotated[int, typer.Option(min=1)] = 18,
    turns: Annotated[int, typer.Option(min=1)] = 4,
    concurrency: Annotated[int, typer.Option(min=1)] = 6,
    output_tokens: Annotated[int, typer.Option(min=1)] = 16,
    memory: Annotated[str, typer.Option(help="KV memory of each worker.")] = "64MiB",
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """The same sessions under every policy."""
    rows = []
    print("| policy | requests | prefill tokens | hit | first token p50 ms | p90 ms | predicted = actual |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for policy in [""] if url else policies.split(","):
        with contextlib.nullcontext(url) if url else serving(model, policy, replicas, memory) as base_url:
            talk = Talk(base_url, seed=seed, turns=turns, output_tokens=output_tokens)
            summary = asyncio.run(talk.run(sessions, concurrency))
            rows.append({"policy": policy, **summary.as_json(), **predictions(base_url)})
        print_row(rows[-1])
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


class Talk:
    """Sessions with one server."""

    def __init__(self, base_url: str, *, seed: int, turns: int, output_tokens: int) -> None:
        self._base_url = base_url
        self._seed = seed
        self._turns = turns
        self._output_tokens = output_tokens
        self._raws: list[RawAnswer] = []
        self._model = ""

    async def run(self, num_sessions: int, concurrency: int) -> Summary:
        """All sessions; each draws its words from a lot of its own, the same under every policy."""
        client = LoadClient(base_url=self._base_url, api="chat", api_key=None, timeout_s=600)
        begin_cpu_s = time.process_time()
        async with client:
            self._model = await client.first_model()
            left = iter(range(num_sessions))
            await asyncio.gather(*(self._sessions(client, left) for _ in range(concurrency)))
        return summarise("sessions", self._raws, client_cpu_s=time.process_time() - begin_cpu_s)

    async def _sessions(self, client: LoadClient, left: Iterator[int]) -> None:
        for session in left:
            rng = random.Random(f"{self._seed}/{session}")
            messages = [message("system", random.Random(self._seed), SYSTEM_WORDS)]
            for turn in range(self._turns):
                messages.append(message("user", rng, rng.randint(*(TURN_WORDS if turn else FIRST_TURN_WORDS))))
                raw = await client.stream(self._body(messages))
                self._raws.append(raw)
                messages.append({"role": "assistant", "content": text_of(raw)})

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": self._output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }


def message(role: str, rng: random.Random, num_words: int) -> dict[str, str]:
    """Words that say nothing."""
    return {"role": role, "content": " ".join(rng.choices(WORDS, k=num_words))}


def text_of(raw: RawAnswer) -> str:
    """What was answered; nothing where it failed."""
    if raw.error:
        return ""
    chunks = [json.loads(data) for _, data in events(read_body(raw)) if data != b"[DONE]"]
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk.get("choices", ())
        if "delta" in choice
    )


@contextlib.contextmanager
def serving(model: str, policy: str, replicas: int, memory: str) -> Iterator[str]:
    """A server on loopback with so many workers of one thread each, ended as Ctrl-C does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {
        "--port": port,
        "--replicas": replicas,
        "--routing-policy": policy,
        "--dtype": "float32",
        "--num-threads": 1,
        "--kv-cache-memory-bytes": memory,
    }
    command = [
        sys.executable,
        "-m",
        "transom_cluster.cli",
        "serve",
        model,
        *(str(x) for pair in flags.items() for x in pair),
    ]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    log = Path(f"routing-{policy}.log")
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, replicas, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(2)
        process.wait(120)
    log.unlink()


def wait_ready(url: str, process: subprocess.Popen[bytes], replicas: int, log: Path) -> None:
    """Until every worker's index is mirrored."""
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        if len(re.findall(r"^transom_router_mirror_version\{", page(url), re.MULTILINE)) >= replicas:
            return
        time.sleep(0.5)
    raise SystemExit(f"The server did not start:\n{log.read_text()[-3000:]}")


def predictions(url: str) -> dict[str, float]:
    """How many answers began with exactly the hit that was predicted."""
    text = page(url)
    exact = sum(
        map(float, re.findall(r'^transom_router_hit_error_tokens_bucket\{[^}]*le="0(?:\.0)?"[^}]*\} (\S+)', text, re.M))
    )
    count = sum(map(float, re.findall(r"^transom_router_hit_error_tokens_count\{[^}]*\} (\S+)", text, re.M)))
    return {"exact_predictions": exact / max(1.0, count)}


def page(url: str) -> str:
    """The metrics; nothing while there is no server."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            return str(response.read().decode())
    except (OSError, urllib.error.URLError):
        return ""


def print_row(row: dict[str, Any]) -> None:
    """A row of a Markdown table."""
    first = row["first_token_ms"]
    cells = (
        row["policy"] or "as it runs",
        row["num_answers"],
        f"{row['num_prompt_tokens'] - row['num_cached_tokens']:,}",
        f"{row['num_cached_tokens'] / max(1, row['num_prompt_tokens']):.1%}",
        f"{first['p50']:.0f}",
        f"{first['p90']:.0f}",
        f"{row['exact_predictions']:.1%}",
    )
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if row["errors"]:
        print(row["errors"], file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
