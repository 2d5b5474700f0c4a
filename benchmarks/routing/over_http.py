"""Routing policies over HTTP on real workers: starts a server for each policy, and talks to it in sessions of several turns.

    python -m benchmarks.routing.over_http --policies kv,round_robin,power_of_two,least_tokens --json http.json

All sessions share a system prompt. Up to `--concurrency` of them are open at once; each sends its next turn, with the answers that
it got, when the last answer is complete. docs/routing.md has the last figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.server_process import ServerProcess, free_port, transom_serve
from benchmarks.serving.load_answers import BrokenAnswer, Summary, read_events, summarise
from benchmarks.serving.load_client import LoadClient, RawAnswer
from benchmarks.serving.load_requests import COMMON_WORDS

WORDS = COMMON_WORDS.split()
MODEL_NAME = "m"
SYSTEM_WORDS = 300
FIRST_TURN_WORDS = (40, 250)
TURN_WORDS = (10, 60)
START_S = 240.0


def main(
    policies: Annotated[str, typer.Option(help="A server is started for each.")] = "kv,least_tokens,round_robin",
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
    for policy in policies.split(","):
        port = free_port()
        command = transom_serve(
            model, port, served_model_name=MODEL_NAME, replicas=replicas, routing_policy=policy, dtype="float32",
            num_threads=1, kv_cache_memory_bytes=memory,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        with ServerProcess(policy, command, os.environ) as server:
            server.wait_until(lambda: num_known_workers(url) >= replicas, START_S)  # noqa: B023, called at once
            talk = Talk(url, seed=seed, turns=turns, output_tokens=output_tokens)
            summary = asyncio.run(talk.run(sessions, concurrency))
            rows.append({"policy": policy, **asdict(summary), "exact_predictions": exact_predictions(url)})
        print(row_of(rows[-1]), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


class Talk:
    """Sessions with one server."""

    def __init__(self, url: str, *, seed: int, turns: int, output_tokens: int) -> None:
        self._client = LoadClient(base_url=url, api="chat", timeout_s=600)
        self._seed, self._turns, self._output_tokens = seed, turns, output_tokens
        self._raws: list[RawAnswer] = []

    async def run(self, num_sessions: int, concurrency: int) -> Summary:
        """All sessions; each draws its words from a lot of its own, the same under every policy."""
        begin_cpu_s, left = time.process_time(), iter(range(num_sessions))
        await asyncio.gather(*(self._sessions(left) for _ in range(concurrency)))
        return summarise("sessions", self._raws, client_cpu_s=time.process_time() - begin_cpu_s)

    async def _sessions(self, left: Iterator[int]) -> None:
        for session in left:
            rng = random.Random(f"{self._seed}/{session}")
            messages = [message("system", random.Random(self._seed), SYSTEM_WORDS)]
            for turn in range(self._turns):
                messages.append(message("user", rng, rng.randint(*(TURN_WORDS if turn else FIRST_TURN_WORDS))))
                raw = await self._client.stream(self._body(messages))
                self._raws.append(raw)
                messages.append({"role": "assistant", "content": text_of(raw)})

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "model": MODEL_NAME,
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
    try:
        chunks = [event for _, event in read_events(raw)]
    except BrokenAnswer:
        return ""
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def num_known_workers(url: str) -> int:
    """Workers whose index a router has."""
    return len(re.findall(r"^transom_router_mirror_version\{", page(url), re.MULTILINE))


def exact_predictions(url: str) -> float:
    """The share of answers that began with exactly the hit that was predicted."""
    text = page(url)
    exact = re.findall(r'^transom_router_hit_error_tokens_bucket\{[^}]*le="0(?:\.0)?"[^}]*\} (\S+)', text, re.M)
    count = re.findall(r"^transom_router_hit_error_tokens_count\{[^}]*\} (\S+)", text, re.M)
    return sum(map(float, exact)) / max(1.0, sum(map(float, count)))


def page(url: str) -> str:
    """The metrics; nothing while there is no server."""
    try:
        return httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    except httpx.TransportError:
        return ""


def row_of(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    cells = (
        row["policy"],
        row["num_answers"],
        f"{row['num_prompt_tokens'] - row['num_cached_tokens']:,}",
        f"{row['num_cached_tokens'] / max(1, row['num_prompt_tokens']):.1%}",
        f"{row['first_token_ms']['p50']:.0f}",
        f"{row['first_token_ms']['p90']:.0f}",
        f"{row['exact_predictions']:.1%}",
    )
    errors = f" {row['errors']}" if row["errors"] else ""
    return "| " + " | ".join(map(str, cells)) + " |" + errors


if __name__ == "__main__":
    typer.run(main)
