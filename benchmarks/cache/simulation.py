"""Prefix hits of every case by eviction policy, beside the published figures of vLLM.

    python -m benchmarks.cache.simulation --configs DIR --traces DIR
    python -m benchmarks.cache.simulation --configs DIR --traces DIR --only sessions --policy default --policy lru
    python -m benchmarks.cache.simulation --configs DIR --traces DIR --only poisson --seed 0 --seed 1 --block-size 128

DIRs hold the models' folders with their config.json, and the traces as JSON lines. Each row is one case; a cell is the share of
prompt tokens hit (+ repaired), and of several seeds the mean, with the range of hits in brackets. The table is Markdown, as in
docs/cache_simulation.md, which has the last figures; the README's plot is drawn from them. Larger hash blocks are simulated faster,
but are not what a server has by default.
"""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.cache.cases import CASES, Case
from benchmarks.cache.eviction_policies import POLICIES
from benchmarks.markdown_table import print_head, print_row
from transom_worker.simulate.simulation import Simulation, SimulationConfig


def main(
    configs: Annotated[Path, typer.Option(help="Models' folders.")],
    traces: Annotated[Path, typer.Option(help="Recorded traces.")],
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    policy: Annotated[list[str] | None, typer.Option(help="Eviction policies; all if unset.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Of the digests and of the workloads' orders; 0 if unset.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a hash block.")] = 16,
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at once, a process each.")] = 1,
) -> None:
    """Simulate every case under every policy."""
    policies = tuple(policy or POLICIES)
    unknown = sorted(set(policies) - set(POLICIES))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(POLICIES)}.", param_hint="--policy")
    cases = [case for case in CASES if only in case.name]
    seeds = tuple(dict.fromkeys(seed or [0]))
    runs = [Run(case, name, one, configs, traces, block_size) for case in cases for name in policies for one in seeds]
    print_head("case", "vLLM", "dense", *policies)
    with ProcessPoolExecutor(jobs) as pool:
        reports = pool.map(simulate_case, runs)  # in the order of the runs
        for case in cases:
            cells = [shares([next(reports) for _ in seeds]) for _ in policies]
            print_row(case.name, percent(case.vllm_default), percent(case.vllm_dense), *cells)


class Run(NamedTuple):
    """One simulation of a case."""

    case: Case
    policy: str
    seed: int
    configs: Path
    traces: Path
    block_size: int


def simulate_case(run: Run) -> dict[str, Any]:
    """One case under one policy, as the JSON report."""
    case = run.case
    config = SimulationConfig(
        model=run.configs / case.model,
        memory=case.memory,
        trace=run.traces / f"{case.trace}.jsonl" if case.trace else None,
        workload=case.workload,
        arrivals=case.arrivals,
        block_size=run.block_size,
        seed=run.seed,
    )
    return Simulation(config, policy=POLICIES[run.policy]()).run().as_json()


def shares(reports: list[dict[str, Any]]) -> str:
    """Percent of prompt tokens hit (+ repaired): the mean of several seeds, and the range of the hits."""
    hits = [report["hit_share"] for report in reports]
    repaired = fmean(report["repaired_share"] for report in reports)
    text = percent(fmean(hits)) + (f" + {percent(repaired)}" if repaired else "")
    return text if len(hits) == 1 else f"{text} ({percent(min(hits))} to {percent(max(hits))})"


def percent(share: float | None) -> str:
    """With one decimal; empty where nothing is known."""
    return "" if share is None else f"{100 * share:.1f}"


if __name__ == "__main__":
    typer.run(main)
