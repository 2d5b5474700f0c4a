"""How much does a hostile client delay another one? A victim's first token and gaps beside a busy client, and beside each attack.

    python -m benchmarks.serving.tenants [--requests 40] [--model smollm2] [--attacks sequences grammars]

Starts `transom serve` with two API keys. The victim sends one request after the other; the other client does one of these things
all the time, within its limits:

    nothing      the server is the victim's
    busy         4 streams of usual lengths: what the others are compared with
    sequences    requests of 128 prompts with 1,000 tokens each
    abandoned    the same, left after half a second, and sent again
    grammars     schemas of 3,000 properties, each another one, left after 0.15 s
    windows      prompts of 120,000 tokens under a new KV policy each, left after a second
    tokenize     two texts of 2 MB to /tokenize at once
    pages        16 connections that ask for /metrics and /debug/requests

It ends with status 1 if an attack makes the victim's first tokens (median) or gaps (mean) more than `BOUND` times as long as the
busy client does. The mean counts for gaps, since prompts come in bursts: the median may change while no token comes later.

Client and server share the machine's cores. docs/security.md has the last figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.server_process import READY, ServerProcess, free_port, transom_serve
from benchmarks.serving.load import TABLE_WIDTH, table
from benchmarks.serving.load_answers import Summary, summarise
from benchmarks.serving.load_client import Load, LoadClient
from benchmarks.serving.load_requests import Workload

START_S = 400.0
SETTLE_S = 3.0  # the other client is at work for so long before the victim's clock starts
TIMEOUT_S = 120.0
BOUND = 2.0
LIMITS = {"requests_per_minute": 6000, "concurrent_requests": 16}

Attack = Callable[[httpx.AsyncClient, int], Awaitable[Any]]


async def sequences(client: httpx.AsyncClient, number: int) -> None:
    """128 prompts of one request, answered to the end."""
    body = {"prompt": [f"Hi {number} {i}" for i in range(128)], "max_tokens": 1000, "ignore_eos": True}
    await client.post("/v1/completions", json=body)


async def abandoned(client: httpx.AsyncClient, number: int) -> None:
    """The same, left after half a second."""
    await leave_after(0.5, sequences(client, number))


async def grammars(client: httpx.AsyncClient, number: int) -> None:
    """A schema that takes long to compile, left before it is compiled."""
    properties = {f"p{number % 50}_{i}": {"type": "string"} for i in range(3000)}
    schema = {"type": "object", "properties": properties}
    body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}
    await leave_after(0.15, client.post("/v1/completions", json=body))


async def windows(client: httpx.AsyncClient, number: int) -> None:
    """A long prompt under a window that no request has used yet, left after a second."""
    policy = {"type": "window", "sinks": 0, "window": 100 + number}
    body = {"prompt": [5] * 120_000, "max_tokens": 1, "kv_policy": policy}
    await leave_after(1.0, client.post("/v1/completions", json=body))


async def tokenize(client: httpx.AsyncClient, number: int) -> None:
    """A text of 2 MB of which each byte is a token."""
    await client.post("/tokenize", json={"prompt": "\u1700" * 600_000})


async def pages(client: httpx.AsyncClient, number: int) -> None:
    """Pages that other processes are asked for."""
    await client.get("/metrics" if number % 2 else "/debug/requests?limit=1")


ATTACKS: dict[str, tuple[int, Attack]] = {  # name -> connections at once, what each of them does again and again
    "sequences": (2, sequences),
    "abandoned": (2, abandoned),
    "grammars": (4, grammars),
    "windows": (2, windows),
    "tokenize": (2, tokenize),
    "pages": (16, pages),
}


async def leave_after(seconds: float, request: Awaitable[Any]) -> None:
    """Make a request, and disconnect if there is no response after `seconds`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(request, seconds)


async def attack(url: str, key: str, name: str) -> None:
    """Do one of `ATTACKS` until this task is cancelled; refusals are not an end."""
    num_connections, act = ATTACKS[name]
    numbers = itertools.count(time.time_ns() % 10_000)
    headers = {"Authorization": f"Bearer {key}"}

    async def one() -> None:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await act(client, next(numbers))
                await asyncio.sleep(0)

    await asyncio.gather(*(one() for _ in range(num_connections)))


async def busy(client: LoadClient, workload: Workload) -> None:
    """Four streams of usual lengths, until this task is cancelled."""
    for number in itertools.count():
        await client.run(Load(concurrency=4), workload.bodies(f"busy {number}"), 64)


async def measure(url: str, keys: list[str], num_requests: int, attacks: list[str], console: Console) -> list[Summary]:
    """The victim's figures beside nothing, beside a busy client, and beside each of these attacks."""
    victim, other = (LoadClient(base_url=url, api_key=key, timeout_s=TIMEOUT_S) for key in keys)
    usual = Workload(model=await victim.first_model(), prompt_tokens=(32, 128), output_tokens=(32, 32))
    await victim.run(Load(concurrency=4), usual.bodies("warm-up"), 8)
    found = []
    for name in ("nothing", "busy", *attacks):
        console.print(f"{name} ...")
        beside = {"nothing": lambda: asyncio.sleep(0), "busy": lambda: busy(other, usual)}
        task = asyncio.create_task(beside[name]() if name in beside else attack(url, keys[1], name))
        await asyncio.sleep(SETTLE_S)
        begin_cpu_s = time.process_time()
        raws = await victim.run(Load(concurrency=1), usual.bodies(name), num_requests)
        found.append(summarise(name, raws, client_cpu_s=time.process_time() - begin_cpu_s))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)
    return found


def ratios(beside: Summary, busy: Summary) -> tuple[float, float]:
    """How many times as long the victim's first tokens (median) and gaps (mean) are as beside the busy client."""
    return (
        beside.first_token_ms.p50 / busy.first_token_ms.p50,
        beside.inter_token_ms.mean / busy.inter_token_ms.mean,
    )


def main() -> None:
    """Start the server, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40, help="of the victim, beside each")
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), default=list(ATTACKS), help="default: all")
    options = parser.parse_args()
    console, port, keys = Console(width=TABLE_WIDTH), free_port(), ["victim", "other"]
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "keys")
        key_file.write_text("\n".join(keys) + "\n")
        key_file.chmod(0o600)
        command = transom_serve(options.model, port, api_key_file=key_file, **LIMITS)
        with ServerProcess("transom", command, os.environ) as server:
            server.wait_until(lambda: READY in server.log_text(), START_S)
            found = asyncio.run(measure(f"http://127.0.0.1:{port}", keys, options.requests, options.attacks, console))
    console.print(table(found, title="the victim, by what another client does"))
    for beside in found[2:]:
        first, gap = ratios(beside, found[1])
        console.print(
            f"{beside.load}: first tokens take {first:.2f} times as long as beside a busy client, gaps {gap:.2f} times"
        )
    if any(max(ratios(beside, found[1])) > BOUND or beside.errors for beside in found[2:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
