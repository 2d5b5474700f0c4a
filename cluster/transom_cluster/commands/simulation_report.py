"""Shows a simulation on the terminal: a progress bar while it runs, and then its results.

A simulation runs requests through scheduler and KV cache without a model. A prompt token is a *hit* (found in the prefix cache),
*missed*, or *repaired*: full-attention layers had it cached, but it was computed again because its sliding windows were evicted.
"""

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from transom_worker.simulate.outcome import Report
from transom_worker.simulate.simulation import Simulation, SimulationConfig

GIB = 2**30


def simulate_with_progress(config: SimulationConfig, *, quiet: bool) -> Report:
    """Run a simulation, with a progress bar on standard error unless `quiet`. Raises ConfigError or ModelError."""
    simulation = Simulation(config)
    if quiet:
        return simulation.run()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(simulation.workload.name), total=len(simulation.workload.requests))
        return simulation.run(lambda num_ended: progress.update(task, completed=num_ended))


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a simulation's settings, its prompt tokens by outcome, and what serving them cost."""
    console = console or Console(highlight=False)
    setup = report.setup  # name -> value of each setting of the simulation
    console.print(
        f"[bold]{escape(str(setup['workload']))}[/bold] on [bold]{escape(str(setup['model']))}[/bold]: "
        f"{report.memory_bytes / GIB:,.2f} GiB of KV, "
        f"arrivals {setup['arrivals']}, blocks of {setup['block_size']}, {setup['max_num_batched_tokens']:,} tokens a step"
    )
    console.print(_outcomes(report))
    console.print(_costs(report))


def _outcomes(report: Report) -> Table:
    """Return a table of the number of prompt tokens with each outcome, and their share of all prompt tokens."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("prompt tokens")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    rows = {"hit": report.hit_tokens, "repaired": report.repaired_tokens}
    rows |= {f"missed, {reason.replace('_', ' ')}": n for reason, n in report.missed_tokens.items()}
    for name, num_tokens in rows.items():
        table.add_row(name, f"{num_tokens:,}", f"{report.share(num_tokens):.1%}")
    table.add_section()
    table.add_row("all", f"{report.prompt_tokens:,}", "")
    return table


def _costs(report: Report) -> str:
    """Return three lines: counts of the whole run, the use of KV memory, and the time on the virtual and on the real clock.
    Leased memory is that of the KV pages in use, each of which belongs to one cache group."""
    figures = report.as_json()
    refused = f", {sum(report.refused.values()):,} refused ({', '.join(report.refused)})" if report.refused else ""
    evictions = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in report.evictions.items()) or "none"
    step_cost = report.setup["step_cost"]
    assert isinstance(step_cost, dict)  # seconds of virtual time of a step, and of each token in it
    return (
        f"{report.requests:,} requests{refused}, {report.output_tokens:,} output tokens, {report.steps:,} steps, "
        f"{report.preemptions:,} preemptions\n"
        f"blocks evicted: {evictions}; {report.fragmentation:.2%} of leased memory in empty blocks\n"
        f"virtual time {report.virtual_seconds:,.0f} s at {step_cost['step_s'] * 1e3:g} ms a step and "
        f"{step_cost['token_s'] * 1e6:g} µs a token; simulated in {report.seconds:.1f} s, {figures['tokens_per_s']:,.0f} tokens/s"
    )
