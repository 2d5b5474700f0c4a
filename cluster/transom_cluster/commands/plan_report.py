"""Prints a KV cache plan on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transom_core.model_config.rank_shares import rank_lines
from transom_worker.planner.plan import CachePlan

if TYPE_CHECKING:
    from transom_worker.execution.setup.weight_plan import WeightPlan

MIN_WIDTH = 120  # columns, if the output is not a terminal
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def print_plan(
    plan: CachePlan,
    model: str,
    console: Console | None = None,
    *,
    kv_policy: str | None = None,
    weights: WeightPlan | None = None,
) -> None:
    """Print the set-up, a row per KV cache group, one request's memory, and the concurrency by context length."""
    console = console or _console()
    ranks = plan.tensor_parallel_size
    console.print(
        f"[bold]{escape(model)}[/bold]: {readable(plan.memory_bytes)} of KV cache"
        f"{f' on each of {ranks} ranks' if ranks > 1 else ''}, {plan.kv_dtype}, up to {plan.max_model_len:,} tokens, "
        f"{plan.max_num_batched_tokens:,} tokens a step"
    )
    console.print(
        f"{plan.num_pages:,} pages of {plan.page_bytes:,} bytes; blocks leave at most {plan.waste:.2%} of a page unused"
    )
    if plan.host_layout is not None:
        console.print(
            f"Host tier: {readable(plan.host_layout.pool_bytes)}{' on each rank' if ranks > 1 else ''}, "
            f"{plan.host_layout.num_pages:,} pages of the same blocks, for evicted prefixes and preempted requests"
        )
    if kv_policy is not None:
        console.print(f"Every request has the KV policy {kv_policy}.")
    if weights is not None:
        kind = "CPU" if weights.device == "cpu" else "CUDA"
        held = ", ".join(f"{num_bytes:,} ({readable(num_bytes)})" for num_bytes in weights.rank_bytes)
        console.print(f"Weights on {kind}, bytes of each rank: {held}; the files have {weights.file_bytes:,}")
    for line in rank_lines(plan.ranks):
        console.print(line)
    if plan.replicated:
        console.print(f"Several ranks hold alike: {', '.join(plan.replicated)}.")
    console.print(_groups(plan))
    console.print(f"One request of {plan.max_model_len:,} tokens takes {readable(plan.request_bytes)}.")
    if plan.in_flight_bytes:
        console.print(f"A step's tokens take up to {readable(plan.in_flight_bytes)} more, once for all requests.")
    if plan.repair_tokens:
        console.print(f"Lost windows are restored exactly by computing {plan.repair_tokens:,} tokens again.")
    console.print(_concurrency(plan))
    if plan.host_concurrency:
        held = ", ".join(f"{point.requests:,} of {point.length:,}" for point in plan.host_concurrency)
        console.print(f"The host tier holds the KV of {held} tokens.")


def readable(num_bytes: int) -> str:
    """Return a number of bytes in the largest unit that it fills, such as 1.25 GiB.

    `bit_length() - 1` is the base-2 logarithm rounded down, and each unit is 2**10 of the unit before it.
    """
    power = min(max(0, num_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
    return f"{num_bytes / 1024**power:,.{2 if power else 0}f} {UNITS[power]}"


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(MIN_WIDTH, console.width))


def _groups(plan: CachePlan) -> Table:
    table = _table(
        "group", "layers", "format", "bytes\na token", "tokens\na block", "bytes\na block", "blocks\na page", "unused"
    )
    for name in ("live", "at most", "in flight"):
        table.add_column(f"blocks\n{name}", justify="right")
    for group in plan.groups:
        table.add_row(
            group.name,
            f"{group.num_layers:,}",
            group.dtype,
            f"{group.bytes_per_token:,.0f}",
            f"{group.block_tokens:,}",
            f"{group.block_bytes:,}",
            f"{group.blocks_per_page:,}",
            f"{group.waste:.2%}",
            f"{group.live_blocks:,}",
            f"{group.peak_blocks:,}",
            f"{group.in_flight_blocks:,}" if group.in_flight_blocks else "",
        )
    return table


def _concurrency(plan: CachePlan) -> Table:
    table = _table("tokens a request", "bytes a request", "requests at once", "beside a full step")
    for point in plan.concurrency:
        table.add_row(
            f"{point.length:,}", readable(point.request_bytes), f"{point.requests:,}", f"{point.requests_with_budget:,}"
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, justify="left" if first == "group" else "right", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
