"""Takes the figures of several engines in turns: offline figures of engines that stay loaded, then servers, one alone at a time.

A round takes each figure once from every engine, in an order that rotates from round to round. A failure is printed, leaves a gap
in the table, and the run goes on.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx

from benchmarks.engine.peers.engine import SERVED_NAME, ChildRun, Engine
from benchmarks.engine.peers.figures import Figure, Figures
from benchmarks.json_child import ChildError
from benchmarks.server_process import ServerError, ServerProcess, free_port
from benchmarks.serving.load_answers import Summary, summarise
from benchmarks.serving.load_client import Load, LoadClient
from benchmarks.serving.load_requests import Workload

Item = TypeVar("Item")
Found = TypeVar("Found")

FIRST_PROMPT = list(range(1000, 1016))
FAILURES = (ChildError, ServerError, RuntimeError, ValueError, OSError, subprocess.SubprocessError)
PAUSE_S = 0.5  # between engines, in which the threads of the one before stop spinning


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured. A decode case is (batch, context, steps)."""

    rounds: int
    sections: tuple[str, ...]
    prefill_tokens: int
    decode: tuple[tuple[int, int, int], ...]
    concurrency: tuple[int, ...]
    requests: int
    start_timeout_s: float = 600.0


class Bench:
    """Takes the figures of some engines. `on_progress` is called after each case and each server."""

    def __init__(self, engines: list[Engine], plan: Plan, *, on_progress: Callable[[], None]) -> None:
        self.engines, self.plan, self._on_progress = engines, plan, on_progress
        self.figures = Figures()
        self.failures: list[str] = []

    def offline(self) -> None:
        """Load all engines, and take each case in turns."""
        runs: dict[str, ChildRun] = {}
        try:
            for engine in self.engines:
                say(f"{engine.name}: loading")
                run = self._attempt(engine.name, "load", engine.offline)
                if run is not None:
                    runs[engine.name] = run
            if "prefill" in self.plan.sections:
                self._prefill(runs)
            if "decode" in self.plan.sections:
                for case in self.plan.decode:
                    self._decode(runs, *case)
                    self._on_progress()
        finally:
            for run in runs.values():
                run.stop()

    def servers(self) -> None:
        """Run every engine's server once a round, alone."""
        for number in range(self.plan.rounds):
            for engine in rotated(self.engines, number):
                self._serve(engine, number)
                self._on_progress()

    def _prefill(self, runs: dict[str, ChildRun]) -> None:
        tokens = self.plan.prefill_tokens
        row = self.figures.row(f"prefill {tokens}", "tokens/s", decimals=0)
        self._turns(runs, row, lambda run: run.prefill(tokens))

    def _decode(self, runs: dict[str, ChildRun], batch: int, context: int, steps: int) -> None:
        row = self.figures.row(f"decode, batch {batch} at {context} to {context + steps}", "tokens/s")
        self._turns(runs, row, lambda run: run.decode(batch, context, steps))

    def _turns(self, runs: dict[str, ChildRun], row: Figure, measure: Callable[[ChildRun], float]) -> None:
        """Take one figure from every engine, in every round."""
        for number in range(self.plan.rounds):
            for name in rotated(list(runs), number):
                time.sleep(PAUSE_S)
                value = self._attempt(name, row.label, lambda run=runs[name]: measure(run))
                row.add(name, number, value)
                said = "failed" if value is None else f"{value:,.1f} tokens/s"
                say(f"{row.label}, round {number + 1}: {name} {said}")

    def _serve(self, engine: Engine, number: int) -> None:
        port = free_port()
        command, environment = engine.server(port), engine.environment()
        say(f"{engine.name}: server, round {number + 1}")
        with ServerProcess(engine.name, command, environment) as server:
            url = f"http://127.0.0.1:{port}"
            self._attempt(engine.name, "server", lambda: self._ask(engine.name, server, url, number))

    def _ask(self, name: str, server: ServerProcess, url: str, number: int) -> None:
        start_s = server.wait_until(lambda: answers(url), self.plan.start_timeout_s)
        say(f"{name}: first answer after {start_s:.1f} s")
        for level in self.plan.concurrency:
            summary = asyncio.run(closed_loop(url, level, self.plan.requests, number))
            self.failures += [f"{name}: {count} x {message}" for message, count in summary.errors.items()]
            speed = self.figures.row(f"HTTP, {level} clients: output", "tokens/s")
            label = f"HTTP, {level} clients: first token p50"
            first = self.figures.row(label, "ms", higher_is_better=False, decimals=0)
            if not summary.errors:
                speed.add(name, number, summary.output_tokens_per_s)
                first.add(name, number, summary.first_token_ms.p50)
            say(
                f"{name}: {level} clients, {summary.output_tokens_per_s:.1f} tokens/s, first token "
                f"{summary.first_token_ms.p50:.0f} ms, client's share of a core {summary.client_cpu_share:.0%}"
            )

    def _attempt(self, name: str, what: str, function: Callable[[], Found]) -> Found | None:
        try:
            return function()
        except FAILURES as error:
            self.failures.append(f"{name}, {what}: {error}")
            say(f"FAILED {self.failures[-1]}")
            return None


async def closed_loop(url: str, level: int, requests: int, number: int) -> Summary:
    """One level of `serving.load`, after two requests that warm up; every round has prompts of its own."""
    workload = Workload(model=SERVED_NAME, seed=number)
    client = LoadClient(base_url=url, timeout_s=600.0)
    await client.run(Load(concurrency=2), workload.bodies("warm-up"), 2)
    load, begin_cpu_s = Load(concurrency=level), time.process_time()
    raws = await client.run(load, workload.bodies(load.label), requests)
    return summarise(load.label, raws, client_cpu_s=time.process_time() - begin_cpu_s)


def answers(url: str) -> bool:
    """Whether a server gives one token."""
    body = {"model": SERVED_NAME, "prompt": FIRST_PROMPT, "max_tokens": 1, "temperature": 0}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def rotated(items: list[Item], number: int) -> list[Item]:
    """The items in the order of this round: each begins in turn."""
    return items[number % len(items) :] + items[: number % len(items)] if items else []


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
