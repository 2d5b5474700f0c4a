"""Prefix hits of every case by eviction policy, beside the published figures of vLLM and what foresight could hit.

    python benchmarks/cache_simulation.py --configs DIR --traces DIR --json results.json
    python benchmarks/cache_simulation.py --configs DIR --traces DIR --only sessions --policy default --policy lru

DIRs hold the models' folders with their config.json, and the traces as JSON lines. Each row is one case; a cell is the share of
prompt tokens hit (+ repaired). The table is Markdown, as in docs/cache_simulation.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from cache_cases import CASES, Case
from eviction_policies import POLICIES
from transom_worker.simulate.simulation import Simulation, SimulationConfig


def main(
    configs: Annotated[Path, typer.Option(help="Models' folders.")],
    traces: Annotated[Path, typer.Option(help="Recorded traces.")],
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    policy: Annotated[list[str] | None, typer.Option(help="Eviction policies; all if unset.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First requests of each trace.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at once, a process each.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every report here as well.")] = None,
) -> None:
    """Simulate every case under every policy."""
    policies = tuple(policy or POLICIES)
    unknown = sorted(set(policies) - set(POLICIES))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(POLICIES)}.", param_hint="--policy")
    cases = [case for case in CASES if only in case.name]
    results: dict[str, dict[str, dict[str, Any]]] = {case.name: {} for case in cases}
    runs = [(case, name, name == policies[0], configs, traces, limit) for case in cases for name in policies]
    print_row("case", "vLLM", "dense", *policies, "full alone", "clairvoyant", "infinite")
    print_row("---", *["---:"] * (5 + len(policies)))
    for case, name, report in _in_order(runs, jobs):
        results[case.name][name] = report
        if len(results[case.name]) == len(policies):
            whole = limit is None or not case.trace  # as published
            published = (case.vllm_default, case.vllm_dense) if whole else (None, None)
            print_row(*case_row(case, results[case.name], policies, published))
    if json_path is not None:
        json_path.write_text(json.dumps(results, indent=1) + "\n")


Run = tuple[Case, str, bool, Path, Path, int | None]


def _in_order(runs: list[Run], jobs: int) -> Iterator[tuple[Case, str, dict[str, Any]]]:
    if jobs == 1:
        for run in runs:
            yield run[0], run[1], simulate_case(run)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for run, report in zip(runs, pool.map(simulate_case, runs), strict=True):
            yield run[0], run[1], report


def simulate_case(run: Run) -> dict[str, Any]:
    """One case under one policy, as the JSON report."""
    case, policy, with_bounds, configs, traces, limit = run
    config = SimulationConfig(
        model=configs / case.model,
        memory=case.memory,
        trace=traces / f"{case.trace}.jsonl" if case.trace else None,
        workload=case.workload,
        arrivals=case.arrivals,
        limit=limit if case.trace else None,
        clairvoyant=with_bounds,
    )
    return Simulation(config, policy=POLICIES[policy]()).run().as_json()


def case_row(
    case: Case,
    reports: dict[str, dict[str, Any]],
    policies: tuple[str, ...],
    published: tuple[float | None, float | None],
) -> Iterator[str]:
    """The cells of one line; `published` are vLLM's shares."""
    yield case.name
    yield from map(percent, published)
    for name in policies:
        report = reports[name]
        repaired = f" + {percent(report['repaired_share'])}" if report["repaired_tokens"] else ""
        yield percent(report["hit_share"]) + repaired
    bounds = reports[policies[0]]["bounds"]
    yield from (percent(bounds[name]["hit_share"]) for name in ("full_alone_lru", "clairvoyant", "infinite"))


def percent(share: float | None) -> str:
    """With one decimal; empty where nothing is known."""
    return "" if share is None else f"{100 * share:.1f}"


def print_row(*cells: str) -> None:
    """One line of a Markdown table, at once."""
    print("| " + " | ".join(cells) + " |", flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
