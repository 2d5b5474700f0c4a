"""`transom bench simulate`: replays requests through the real scheduler and KV cache, without a model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from transom_cluster.commands.flags import usage_errors


def simulate(
    model: Annotated[Path, typer.Option(help="Folder with a config.json, or the file itself; no weights needed.")],
    memory: Annotated[
        str,
        typer.Option(help="KV pool, such as 40GiB; for workloads also a multiple of the sessions' full blocks: 2x."),
    ],
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with timestamp, input_length, output_length, hash_ids.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="Instead of a trace: sessions, shuffled, poisson, system-prompt, shared-prefixes, edited-message, long-answers "
            "or agents."
        ),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="sequential: one request at a time; recorded: at their times, on a virtual clock.")
    ] = "sequential",
    host_memory: Annotated[
        str, typer.Option("--host-memory", "--swap-space", help="Host tier, such as 60GiB; 0 for none.")
    ] = "0",
    skip: Annotated[int, typer.Option(min=0, help="Leave out the first requests.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay at most this many requests.")] = None,
    block_size: Annotated[int, typer.Option(min=1, max=256, help="Tokens per hash block of the prefix cache.")] = 16,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per step; 8192 for traces, 2048 for workloads if unset.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 256,
    window_repair: Annotated[bool, typer.Option(help="Replay a bounded tail where only windows are gone.")] = True,
    seed: Annotated[
        int, typer.Option(help="Of the shuffled and Poisson orders, of agents, and of the digests (any trace).")
    ] = 0,
    step_seconds: Annotated[float, typer.Option(min=0.0, help="Virtual clock: each step.")] = 0.008,
    token_seconds: Annotated[float, typer.Option(min=0.0, help="Virtual clock: each token in a step.")] = 0.00002,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the prefix hits of a trace in a KV pool of this memory, with the real scheduler and cache and without a model."""
    from transom_cluster.commands.simulation_report import print_report, simulate_with_progress
    from transom_worker.simulate.replay import StepCost
    from transom_worker.simulate.simulation import SimulationConfig

    config = SimulationConfig(
        model=model,
        memory=memory,
        trace=trace,
        workload=workload,
        arrivals=arrivals,
        host_memory=host_memory,
        skip=skip,
        limit=limit,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        window_repair=window_repair,
        seed=seed,
        cost=StepCost(step_s=step_seconds, token_s=token_seconds),
    )
    with usage_errors():
        report = simulate_with_progress(config, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        print_report(report)
