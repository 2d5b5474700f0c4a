"""Routing policies on fleets in virtual time: prefill computed, hits, first tokens; and what mirrors and placements cost.

    python benchmarks/routing.py simulate --config DIR --workers 3,8 [--json FILE]
    python benchmarks/routing.py costs [--json FILE]

DIR holds a model's config.json. Two routers share every fleet. The tables are Markdown, as in docs/routing.md.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

import typer

from ray_prefix_router import RayPrefixRouter, RayPrefixState
from routing_costs import costs
from routing_disk import disk_costs
from routing_fleet import FleetSimulation, PlacerRouter, Router, Totals
from routing_workers import BLOCK_SIZE, ScheduledWorker
from routing_workloads import WORKLOADS
from transom_core.contract import WorkerInfo
from transom_worker.simulate.geometry import read_geometry
from transom_worker.simulate.virtual_time import StepCost

NUM_ROUTERS = 2
MAX_NUM_SEQS = 64
NUM_BATCHED_TOKENS = 2_048

app = typer.Typer(help="Routing benchmarks.", add_completion=False)

RouterMaker = Callable[[dict[str, WorkerInfo]], list[Router]]


def _ours(policy: Any) -> RouterMaker:
    return lambda infos: [PlacerRouter(policy, infos, seed) for seed in range(NUM_ROUTERS)]


def _ray(threshold: float) -> RouterMaker:
    def make(infos: dict[str, WorkerInfo]) -> list[Router]:
        state = RayPrefixState(list(infos))
        return [RayPrefixRouter(state, seed, imbalanced_threshold=threshold) for seed in range(NUM_ROUTERS)]

    return make


ROUTERS: dict[str, RouterMaker] = {
    "kv": _ours("kv"),
    "least_tokens": _ours("least_tokens"),
    "power_of_two": _ours("power_of_two"),
    "round_robin": _ours("round_robin"),
    "Ray prefix-aware": _ray(float("inf")),
    "Ray prefix-aware, threshold 10": _ray(10),
}


@app.command()
def simulate(
    config: Annotated[Path, typer.Option(help="A model's folder.")],
    workers: Annotated[str, typer.Option(help="Fleet sizes.")] = "3,8",
    memory: Annotated[str, typer.Option(help="KV memory of each worker.")] = "3GiB",
    workload: Annotated[list[str] | None, typer.Option(help="Some workloads; all if unset.")] = None,
    router: Annotated[list[str] | None, typer.Option(help="Some routers; all if unset.")] = None,
    load: Annotated[float, typer.Option(help="Arrivals come so many times as fast.")] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Every router on every workload and fleet."""
    rows = []
    print_row("workload", "workers", "router", "prefill tokens", "hit", "first token p50 ms", "p95 ms", "busiest", "s")
    print_row("---", *["---:"] * 8)
    for name in workload or WORKLOADS:
        for num_workers in map(int, workers.split(",")):
            for label in router or ROUTERS:
                begin_s = time.perf_counter()
                totals, differences = run(config, memory, name, num_workers, label, load=load, seed=seed)
                row = summary(totals) | {"workload": name, "workers": num_workers, "router": label}
                if differences:
                    row["exact_predictions"] = sum(not one for one in differences) / len(differences)
                rows.append(row)
                print_row(
                    name,
                    num_workers,
                    label,
                    f"{row['prefill_tokens']:,}",
                    f"{row['hit_rate']:.1%}",
                    f"{row['first_token_p50_ms']:.0f}",
                    f"{row['first_token_p95_ms']:.0f}",
                    f"{row['busiest_share']:.2f}",
                    f"{time.perf_counter() - begin_s:.0f}",
                )
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1) + "\n")


@app.command("costs")
def costs_command(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    """Memory and time of mirrors, placements and updates."""
    figures = costs()
    for name, value in figures.items():
        print_row(name, f"{value:,.3g}" if isinstance(value, float) else value)
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")


@app.command("disk")
def disk_command() -> None:
    """What it costs that routers know what is on the workers' disks."""
    for name, value in disk_costs().items():
        print_row(name, f"{value:,.3g}")


def run(
    config: Path, memory: str, workload: str, num_workers: int, router: str, *, load: float, seed: int
) -> tuple[Totals, list[int]]:
    """One simulation; with the differences between predicted and actual hits, where the router predicts."""
    geometry = read_geometry(config, memory=memory, block_size=BLOCK_SIZE, max_num_batched_tokens=NUM_BATCHED_TOKENS)
    fleet = [
        ScheduledWorker(
            name,
            geometry.layout,
            cost=StepCost(),
            max_num_seqs=MAX_NUM_SEQS,
            num_batched=NUM_BATCHED_TOKENS,
        )
        for name in map(str, range(num_workers))
    ]
    routers = ROUTERS[router]({worker.worker_id: worker.info for worker in fleet})
    requests = WORKLOADS[workload](num_workers, random.Random(seed), load)
    totals = FleetSimulation(requests, fleet, routers).run()
    return totals, [one for router in routers if isinstance(router, PlacerRouter) for one in router.differences]


def summary(totals: Totals) -> dict[str, Any]:
    """The figures of a row."""
    cuts = quantiles(totals.first_token_s, n=20)
    requests = totals.by_worker.values()
    return {
        "prefill_tokens": totals.prefill_tokens,
        "hit_rate": totals.cached_tokens / totals.prompt_tokens,
        "first_token_p50_ms": cuts[9] * 1e3,
        "first_token_p95_ms": cuts[18] * 1e3,
        "busiest_share": max(requests) * len(requests) / sum(requests),
        "preemptions": totals.preemptions,
        "virtual_s": totals.virtual_s,
    }


def print_row(*cells: object) -> None:
    """A row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |")
    sys.stdout.flush()


if __name__ == "__main__":
    app()
