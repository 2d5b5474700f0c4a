"""Shows a simulation on the terminal: a progress bar while it runs, and a table of its results."""

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from transom_worker.simulate.outcome import Report
from transom_worker.simulate.simulation import Simulation, SimulationConfig

GIB = 2**30


def simulate_with_progress(config: SimulationConfig, *, quiet: bool) -> Report:
    """Run a simulation, with a progress bar on standard error unless `quiet`. Raises the errors of `Simulation`."""
    simulation = Simulation(config)
    if quiet:
        return simulation.run()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(simulation.workload.name), total=len(simulation.workload.requests))
        return simulation.run(lambda num_ended: progress.update(task, completed=num_ended))


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a simulation's prompt tokens by outcome, and the costs."""
    console = console or Console(highlight=False)
    setup = report.setup
    console.print(
        f"[bold]{escape(str(setup['workload']))}[/bold] on [bold]{escape(str(setup['model']))}[/bold]: "
        f"{report.memory_bytes / GIB:,.2f} GiB of KV, "
        f"arrivals {setup['arrivals']}, blocks of {setup['block_size']}, {setup['max_num_batched_tokens']:,} tokens a step"
    )
    console.print(_outcomes(report))
    console.print(_costs(report))


def _outcomes(report: Report) -> Table:
    table = _table("prompt tokens", "tokens", "share")
    rows = {"hit": report.hit_tokens, "repaired": report.repaired_tokens}
    rows |= {f"missed, {reason.replace('_', ' ')}": n for reason, n in report.missed_tokens.items()}
    for name, num_tokens in rows.items():
        table.add_row(name, f"{num_tokens:,}", f"{report.share(num_tokens):.1%}")
    table.add_section()
    table.add_row("all", f"{report.prompt_tokens:,}", "")
    return table


def _costs(report: Report) -> str:
    figures = report.as_json()
    refused = f", {sum(report.refused.values()):,} refused ({', '.join(report.refused)})" if report.refused else ""
    evictions = ", ".join(f"{n:,} {reason.replace('_', ' ')}" for reason, n in report.evictions.items()) or "none"
    cost = report.setup["step_cost"]
    assert isinstance(cost, dict)
    return (
        f"{report.requests:,} requests{refused}, {report.output_tokens:,} output tokens, {report.steps:,} steps, "
        f"{report.preemptions:,} preemptions\n"
        f"blocks evicted: {evictions}; {report.fragmentation:.2%} of leased memory in empty blocks\n"
        f"virtual time {report.virtual_seconds:,.0f} s at {cost['step_s'] * 1e3:g} ms a step and "
        f"{cost['token_s'] * 1e6:g} µs a token; simulated in {report.seconds:.1f} s, {figures['tokens_per_s']:,.0f} tokens/s"
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at else "left")
    return table
