"""Routing at scale: fleets of up to hundreds of workers with a mix of requests, in virtual time, with the router's real code.

    python benchmarks/routing_scale.py growth [--workers 10,50,200,400] [--requests 3000]
    python benchmarks/routing_scale.py bookkeeping [--workers 200] [--routers 8]
    python benchmarks/routing_scale.py routers [--workers 50] [--counts 1,2,8] [--seeds 3]
    python benchmarks/routing_scale.py policies [--workers 50] [--seeds 3]

`growth`: CPU time of a placement and memory of a router by the number of workers. `bookkeeping`: CPU time that a router spends on
messages without output. `routers`: what it costs that routers do not know of each other's placements (herding). `policies`: beside
other policies and Ray Serve's prefix-aware router. Workers are `ModelWorker`s: a cache and a queue in place of a scheduler. CPU
times are this process's own. The tables are Markdown, as in docs/routing.md.
"""

from __future__ import annotations

import gc
import random
import resource
import time
from statistics import fmean, quantiles
from typing import Annotated, Any

import typer

from ray_prefix_router import RayPrefixRouter, RayPrefixState
from routing import print_row
from routing_bookkeeping import replayed_cpu_s
from routing_fleet import FleetSimulation, PlacerRouter, Router, Totals
from routing_workers import ModelWorker
from routing_workloads import MIXED_RATE, mixed
from transom_core.contract import WorkerInfo, WorkerMessage
from transom_worker.simulate.virtual_time import StepCost

CAPACITY_TOKENS = 100_000  # of each worker's cache
COST = StepCost(step_s=0.008, token_s=0.00005)

app = typer.Typer(help="Routing at scale.", add_completion=False)


def fleet(num_workers: int, *, is_full: bool = False) -> list[ModelWorker]:
    """Workers of one kind."""
    names = [f"{worker:03}" for worker in range(num_workers)]
    return [ModelWorker(name, capacity_tokens=CAPACITY_TOKENS, cost=COST, is_full=is_full) for name in names]


def make_routers(kind: str, infos: dict[str, WorkerInfo], count: int) -> list[Router]:
    """Routers of a policy of ours, or the model of Ray's."""
    if kind.startswith("Ray"):
        state = RayPrefixState(list(infos))
        threshold = 10.0 if "threshold" in kind else float("inf")
        return [RayPrefixRouter(state, seed, imbalanced_threshold=threshold) for seed in range(count)]
    return [PlacerRouter(kind, infos, seed) for seed in range(count)]  # type: ignore[arg-type]


def simulate(
    kind: str,
    *,
    num_workers: int,
    num_routers: int,
    seconds: float,
    load: float,
    seed: int,
    hot_share: float = 0.0,
    is_full: bool = False,
    **options: Any,
) -> tuple[Totals, list[Router]]:
    """One run."""
    workers = fleet(num_workers, is_full=is_full)
    routers = make_routers(kind, {worker.worker_id: worker.info for worker in workers}, num_routers)
    workload = mixed(num_workers, random.Random(seed), load, seconds, hot_share=hot_share)
    return FleetSimulation(workload, workers, routers, **options).run(), routers


def placement_us(routers: list[Router]) -> tuple[float, float]:
    """Median and 99th percentile of all routers' placements, in microseconds of CPU time; warm ones."""
    ours = [router.placement_s for router in routers if isinstance(router, PlacerRouter)]
    times = [one for times in ours for one in times[len(times) // 3 :]]
    cuts = quantiles(times, n=100)
    return cuts[49] * 1e6, cuts[98] * 1e6


@app.command()
def growth(
    workers: Annotated[str, typer.Option(help="Fleet sizes.")] = "10,50,100,200,400",
    requests: Annotated[int, typer.Option(help="About so many; a fleet of N workers gets 5 N each second.")] = 3_000,
    policy: Annotated[str, typer.Option()] = "kv",
) -> None:
    """Placements of one of two routers; `MIXED_RATE` requests per second and worker."""
    print_row(
        "workers", "requests", "p50 us", "p99 us", "placements per CPU s", "messages per virtual s", "MB", "CPU s"
    )
    print_row("---:", *["---:"] * 7)
    for num_workers in map(int, workers.split(",")):
        gc.collect()
        begin_s, begin_kb = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = requests / (MIXED_RATE * num_workers)
        totals, routers = simulate(
            policy, num_workers=num_workers, num_routers=2, seconds=seconds, load=1.0, seed=0, is_full=True
        )
        p50, p99 = placement_us(routers)
        times = [one for router in routers for one in router.placement_s]  # type: ignore[attr-defined]
        used_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin_kb) / 1024
        print_row(
            num_workers,
            len(totals.first_token_s),
            f"{p50:.0f}",
            f"{p99:.0f}",
            f"{1 / fmean(times):,.0f}",
            f"{totals.messages / totals.virtual_s / 2:,.0f}",
            f"{used_mb:.0f}",
            f"{time.process_time() - begin_s:.0f}",
        )


@app.command()
def bookkeeping(
    workers: Annotated[int, typer.Option()] = 200,
    routers: Annotated[int, typer.Option(help="Of which one is measured; the others are simulated as one.")] = 8,
    seconds: Annotated[float, typer.Option(help="Virtual seconds of arrivals.")] = 3.0,
    load: Annotated[float, typer.Option(help="Arrivals come so many times as fast.")] = 1.0,
) -> None:
    """Messages of all workers to one router, pickled as Ray does, into real worker connections, queue and placer."""
    recorded: list[tuple[float, str, WorkerMessage]] = []

    def record(number: int, worker_id: str, message: WorkerMessage, now_s: float) -> None:
        if number == 0:
            recorded.append((now_s, worker_id, message))

    totals, _ = simulate(
        "kv",
        num_workers=workers,
        num_routers=2,
        seconds=seconds,
        load=load,
        seed=0,
        is_full=True,
        router_of=lambda index: int(index % routers != 0),
        on_message=record,
    )
    warm_s = seconds / 3
    infos = {worker.worker_id: worker.info for worker in fleet(workers)}
    busy = [one for one in recorded if one[0] <= seconds]
    result = replayed_cpu_s(infos, busy, from_s=warm_s)
    span_s = seconds - warm_s
    print_row("fleet", "messages per s", "without output", "KB per s", "decode and apply, share of a core")
    print_row("---", *["---:"] * 4)
    for name, figures, span in (
        ("idle, heartbeats only", replayed_cpu_s(infos, heartbeats(list(infos)), from_s=0.0), 10.0),
        (f"{sum(totals.by_worker.values()) / seconds:,.0f} requests a second", result, span_s),
    ):
        print_row(
            name,
            f"{figures.num_messages / span:,.0f}",
            f"{figures.num_without_events / span:,.0f}",
            f"{figures.num_bytes / span / 1e3:,.0f}",
            f"{figures.cpu_s / span:.1%}",
        )


def heartbeats(names: list[str]) -> list[tuple[float, str, WorkerMessage]]:
    """Those of ten seconds."""
    return [(second, name, WorkerMessage()) for second in (2.0, 7.0) for name in names]


@app.command("routers")
def routers_command(
    workers: Annotated[int, typer.Option()] = 50,
    counts: Annotated[str, typer.Option(help="Numbers of routers.")] = "1,2,8",
    seeds: Annotated[int, typer.Option()] = 3,
    seconds: Annotated[float, typer.Option(help="Virtual seconds of arrivals.")] = 15.0,
    load: Annotated[float, typer.Option(help="Arrivals come so many times as fast.")] = 1.0,
    hot: Annotated[float, typer.Option(help="Share of the requests about one document.")] = 0.5,
) -> None:
    """The same requests through one router and through several."""
    rows = {f"{count} routers": ("kv", int(count)) for count in counts.split(",")}
    compare(rows, workers, seeds, seconds=seconds, load=load, hot_share=hot)


@app.command()
def policies(
    workers: Annotated[int, typer.Option()] = 50,
    routers: Annotated[int, typer.Option()] = 2,
    seeds: Annotated[int, typer.Option()] = 3,
    seconds: Annotated[float, typer.Option(help="Virtual seconds of arrivals.")] = 15.0,
    load: Annotated[float, typer.Option(help="Arrivals come so many times as fast.")] = 1.0,
    kinds: Annotated[
        str, typer.Option()
    ] = "kv,power_of_two,round_robin,Ray prefix-aware,Ray prefix-aware threshold 10",
) -> None:
    """Our policies and Ray's router on the same requests."""
    compare({kind: (kind, routers) for kind in kinds.split(",")}, workers, seeds, seconds=seconds, load=load)


def compare(rows: dict[str, tuple[str, int]], workers: int, seeds: int, **options: float) -> None:
    """A row each: mean and range over the seeds."""
    print_row("router", "hit", "prefill tokens", "first token p50 ms", "p95 ms", "p99 ms", "most busy", "CPU s")
    print_row("---", *["---:"] * 7)
    for name, (kind, count) in rows.items():
        begin_s = time.process_time()
        runs = [
            summary(
                simulate(kind, num_workers=workers, num_routers=count, seed=seed, **options)[0]  # type: ignore[arg-type]
            )
            for seed in range(seeds)
        ]
        cells = [mean_and_range([run[at] for run in runs], form) for at, form in enumerate(FORMS)]
        print_row(name, *cells, f"{time.process_time() - begin_s:.0f}")


FORMS = ("{:.1%}", "{:,.0f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.2f}")


def summary(totals: Totals) -> tuple[float, ...]:
    """A run's figures in the order of `FORMS`."""
    cuts = quantiles(totals.first_token_s, n=100)
    requests = totals.by_worker.values()
    busiest = max(requests) * len(requests) / sum(requests)
    hit = totals.cached_tokens / totals.prompt_tokens
    return hit, totals.prefill_tokens, cuts[49] * 1e3, cuts[94] * 1e3, cuts[98] * 1e3, busiest


def mean_and_range(values: list[float], form: str) -> str:
    """For example `12 (11 to 14)`."""
    mean, low, high = (form.format(value) for value in (fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


if __name__ == "__main__":
    app()
