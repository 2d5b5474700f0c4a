"""Load on any OpenAI-compatible server: first token, gaps between tokens, throughput.

    python -m benchmarks.serving.load
    python -m benchmarks.serving.load http://127.0.0.1:8000 --concurrency 1,4,16
    python -m benchmarks.serving.load http://127.0.0.1:8000 --rate 2,4 --shared-prefix 256

Closed loop: `--concurrency` clients, each sending its next request when its answer is complete. Open loop: requests arrive at
`--rate` per second (Poisson), even if the server is late. Several levels run one after another, with prompts of their own.
Without a URL it serves the demo model itself, as `make bench` does. docs/performance.md has the last figures.

Why a client of our own: client and server share two cores in these figures, so a client must cost little, and engines are compared
on prompts of exactly the same token ids. 8,192 tokens in 64 streams, 16 at once, took 1.4 s of processor time here and 25 s with
aiperf 0.13, start included (0.9 and 9 s): per token twice what Transom's proxy, router and worker spend on streaming it. aiperf and
guidellm send texts, for which they need a tokenizer's files (the demo model is one GGUF file); aiperf pins versions of its
requirements that exclude ours, and guidellm and vLLM's client bring a second torch.
"""

import asyncio
import contextlib
import sys
import time
from dataclasses import replace
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.server_process import start_server
from benchmarks.serving.load_answers import BrokenAnswer, Percentiles, Summary, read_answer, summarise
from benchmarks.serving.load_client import Load, LoadClient, Workload

TABLE_WIDTH = 140


def main(
    url: Annotated[str, typer.Argument(help="The server, with or without /v1; `transom serve smollm2` if empty.")] = "",
    concurrency: Annotated[str, typer.Option(help="Closed loop: clients, one level after another.")] = "1,4,16",
    rate: Annotated[str, typer.Option(help="Open loop instead: requests per second, one level after another.")] = "",
    requests: Annotated[int, typer.Option(min=0, help="Per level; 0: 8 per client, at least 32.")] = 0,
    prompt_tokens: Annotated[str, typer.Option(help="Range of prompt lengths.")] = "32-512",
    output_tokens: Annotated[str, typer.Option(help="Range of answer lengths.")] = "16-128",
    shared_prefix: Annotated[int, typer.Option(min=0, help="First tokens that all prompts share.")] = 0,
    warmup: Annotated[int, typer.Option(min=1, help="Requests before the clock starts.")] = 4,
    seed: Annotated[int, typer.Option()] = 0,
    model: Annotated[str, typer.Option(help="The first that the server lists, if empty.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY")] = "",
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest answer, in seconds.")] = 300.0,
) -> None:
    """Measure an OpenAI-compatible server under load."""
    workload = Workload(
        model=model,
        prompt_tokens=read_range(prompt_tokens),
        output_tokens=read_range(output_tokens),
        shared_prefix_tokens=shared_prefix,
        seed=seed,
    )
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    loads = read_loads(concurrency, rate)
    with contextlib.nullcontext() if url else start_server("smollm2") as server:
        url = url if server is None else server.url
        try:
            client = LoadClient(base_url=url, api_key=api_key or None, timeout_s=timeout_s)
            workload, summaries = asyncio.run(measure(client, workload, loads, requests, warmup, console))
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from None
        except (httpx.HTTPError, OSError, RuntimeError) as error:
            raise SystemExit(f"{url}: {error}") from None
    console.print(table(summaries, title=f"{workload.model}, {workload}"))
    for summary in summaries:
        for message, count in summary.errors.items():
            console.print(f"{summary.load}: {count} x {message}", markup=False)
    if any(summary.errors for summary in summaries):
        raise SystemExit(1)


def read_range(text: str) -> tuple[int, int]:
    """`32-512`, or one number for both ends."""
    try:
        low, _, high = text.partition("-")
        ends = int(low), int(high or low)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a range of tokens; write 32-512 or 64.") from None
    if not 1 <= ends[0] <= ends[1]:
        raise typer.BadParameter(f"{text!r} is not a range of tokens; the first must be from 1 to the second.")
    return ends


def read_loads(concurrency: str, rate: str) -> list[Load]:
    """The levels to run, from lists separated by commas."""
    try:
        if rate:
            loads = [Load(rate_per_s=float(part)) for part in rate.split(",")]
        else:
            loads = [Load(concurrency=int(part)) for part in concurrency.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{rate or concurrency!r} is not a list of numbers such as 1,4,16.") from None
    if any((load.rate_per_s or load.concurrency or 0) <= 0 for load in loads):
        raise typer.BadParameter(f"{rate or concurrency!r} has a level that is not above 0.")
    return loads


async def measure(
    client: LoadClient, workload: Workload, loads: list[Load], num_requests: int, warmup: int, console: Console
) -> tuple[Workload, list[Summary]]:
    """Warm up, then run every level. Raises RuntimeError when no warm-up request succeeds."""
    summaries: list[Summary] = []
    if not workload.model:
        workload = replace(workload, model=await client.first_model())
    await warm_up(client, workload, warmup)
    for load in loads:
        count = num_requests or max(32, 8 * (load.concurrency or 0))
        console.print(f"{load.label}: {count} requests ...")
        begin_cpu_s = time.process_time()
        raws = await client.run(load, workload.bodies(load.label), count, workload.seed)
        summaries.append(summarise(load.label, raws, client_cpu_s=time.process_time() - begin_cpu_s))
    return workload, summaries


async def warm_up(client: LoadClient, workload: Workload, count: int) -> None:
    """Send requests that are not counted. Raises RuntimeError when the first fails."""
    first = await client.stream(next(workload.bodies("probe")))
    try:
        read_answer(first)
    except BrokenAnswer as error:
        raise RuntimeError(f"the first request failed: {error}") from None
    await client.run(Load(concurrency=count), workload.bodies("warm-up"), count)


def table(summaries: list[Summary], *, title: str) -> Table:
    """One row a level; latencies as p50 / p90 / p99 in milliseconds."""
    result = Table(title=title)
    result.add_column("load")
    for column in ("answers", "errors", "output tok/s", "req/s", "first token ms", "inter-token ms", "end to end ms"):
        result.add_column(column, justify="right")
    result.add_column("client CPU", justify="right")
    for summary in summaries:
        result.add_row(
            summary.load,
            str(summary.num_answers),
            str(sum(summary.errors.values())),
            f"{summary.output_tokens_per_s:.1f}",
            f"{summary.requests_per_s:.2f}",
            three(summary.first_token_ms),
            three(summary.inter_token_ms),
            three(summary.end_to_end_ms),
            f"{summary.client_cpu_share:.0%}",
        )
    return result


def three(figures: Percentiles) -> str:
    """p50 / p90 / p99."""
    return " / ".join(
        f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in (figures.p50, figures.p90, figures.p99)
    )


if __name__ == "__main__":
    typer.run(main)
