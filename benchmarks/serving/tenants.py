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

Clients and server share the machine's cores. docs/security.md has the last figures.
"""

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.server_process import start_server
from benchmarks.serving.load import TABLE_WIDTH, table
from benchmarks.serving.load_answers import Summary, summarise
from benchmarks.serving.load_client import PATH, Load, LoadClient, Workload

SETTLE_S = 3.0  # the other client is at work for so long before the victim's clock starts
TIMEOUT_S = 120.0
BOUND = 2.0
VICTIM, OTHER = "victim", "other"  # API keys
LIMITS = {"requests_per_minute": 6000, "concurrent_requests": 16}


@dataclass(frozen=True, slots=True)
class Attack:
    """What each of `num_connections` sends again and again, and when it leaves. Without a body it gets the paths in turn."""

    num_connections: int
    leave_after_s: float
    paths: tuple[str, ...]
    body: Callable[[int], dict[str, Any]] | None = None  # number of the request -> its body


def _prompts(number: int) -> dict[str, Any]:
    return {"prompt": [f"Hi {number} {i}" for i in range(128)], "max_tokens": 1000, "ignore_eos": True}


def _schema(number: int) -> dict[str, Any]:
    properties = {f"p{number % 50}_{i}": {"type": "string"} for i in range(3000)}
    schema = {"type": "object", "properties": properties}
    return {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}


def _window(number: int) -> dict[str, Any]:
    policy = {"type": "window", "sinks": 0, "window": 100 + number % 8000}  # which the model's length allows
    return {"prompt": [5] * 120_000, "max_tokens": 1, "kv_policy": policy}


ATTACKS = {
    "sequences": Attack(2, TIMEOUT_S, (PATH,), _prompts),
    "abandoned": Attack(2, 0.5, (PATH,), _prompts),
    "grammars": Attack(4, 0.15, (PATH,), _schema),
    "windows": Attack(2, 1.0, (PATH,), _window),
    "tokenize": Attack(2, TIMEOUT_S, ("/tokenize",), lambda _: {"prompt": "\u1700" * 600_000}),
    "pages": Attack(16, TIMEOUT_S, ("/metrics", "/debug/requests?limit=1")),
}


async def attack(url: str, key: str, attack: Attack) -> None:
    """Attack until this task is cancelled; refusals are not an end."""
    numbers = itertools.count(time.time_ns() % 10_000)
    headers = {"Authorization": f"Bearer {key}"}

    async def one() -> None:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
            while True:
                number = next(numbers)
                path, body = attack.paths[number % len(attack.paths)], attack.body and attack.body(number)
                with contextlib.suppress(httpx.HTTPError, TimeoutError):
                    request = client.request("POST" if body else "GET", path, json=body)
                    await asyncio.wait_for(request, attack.leave_after_s)

    await asyncio.gather(*(one() for _ in range(attack.num_connections)))


async def usual_workload(client: LoadClient) -> Workload:
    """Requests of usual lengths."""
    return Workload(model=await client.first_model(), prompt_tokens=(32, 128), output_tokens=(32, 32))


async def be_busy(url: str, key: str) -> None:
    """Four streams of usual lengths, until this task is cancelled."""
    client = LoadClient(base_url=url, api_key=key, timeout_s=TIMEOUT_S)
    usual = await usual_workload(client)
    for number in itertools.count():
        await client.run(Load(concurrency=4), usual.bodies(f"busy {number}"), 64)


@contextlib.asynccontextmanager
async def other_client(name: str, url: str) -> AsyncIterator[None]:
    """Have a process of its own do this meanwhile; in the victim's process it would delay what the victim measures."""
    command = (sys.executable, "-m", "benchmarks.serving.tenants", "--as-other", name, url)
    # In a session of its own: Linux divides cores by sessions first, and the victim would get what its own leaves.
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    await process.stdout.readline()  # it has begun
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def measure(url: str, num_requests: int, attacks: list[str], console: Console) -> list[Summary]:
    """The victim's figures beside nothing, beside a busy client, and beside each of these attacks."""
    victim = LoadClient(base_url=url, api_key=VICTIM, timeout_s=TIMEOUT_S)
    usual = await usual_workload(victim)
    await victim.run(Load(concurrency=4), usual.bodies("warm-up"), 8)
    found = []
    for name in ("nothing", "busy", *attacks):
        console.print(f"{name} ...")
        async with contextlib.nullcontext() if name == "nothing" else other_client(name, url):
            await asyncio.sleep(SETTLE_S)
            begin_cpu_s = time.process_time()
            raws = await victim.run(Load(concurrency=1), usual.bodies(name), num_requests)
        found.append(summarise(name, raws, client_cpu_s=time.process_time() - begin_cpu_s))
        await asyncio.sleep(SETTLE_S)
    return found


def ratios(beside: Summary, busy: Summary) -> tuple[float, float]:
    """How many times as long the victim's first tokens (median) and gaps (mean) are as beside the busy client."""
    return (beside.first_token_ms.p50 / busy.first_token_ms.p50, beside.inter_token_ms.mean / busy.inter_token_ms.mean)


def main() -> None:
    """Start the server, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40, help="of the victim, beside each")
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), default=list(ATTACKS), help="default: all")
    parser.add_argument("--as-other", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_other:
        name, url = options.as_other
        print("begins", flush=True)
        asyncio.run(be_busy(url, OTHER) if name == "busy" else attack(url, OTHER, ATTACKS[name]))
    console = Console(width=TABLE_WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder, "keys")
        key_file.write_text(f"{VICTIM}\n{OTHER}\n")
        key_file.chmod(0o600)
        with start_server(options.model, api_key_file=key_file, **LIMITS) as server:
            found = asyncio.run(measure(server.url, options.requests, options.attacks, console))
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
