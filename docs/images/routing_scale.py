#!/usr/bin/env python3
"""Draw docs/images/routing_scale.svg from the tables of docs/routing.md: first-token times by router, and what a placement costs.

    python docs/images/routing_scale.py

A bar is the mean of the seeds, a line over it their range.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
TABLES = FOLDER.parent / "routing.md"
WIDTH, LABEL, BAR, GAP = 760, 230, 420, 22
OWN, OTHER, INK = "#2563eb", "#a8b0ba", "#1f2328"


class Bar(NamedTuple):
    """A row of a table: its first cell, and one figure with its range."""

    label: str
    mean: float
    low: float
    high: float


def rows(first_cell: str, column: str) -> Iterator[Bar]:
    """The rows of the table that has these two cells in its header."""
    header: list[str] = []
    for line in TABLES.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[:1] == [first_cell] and column in cells:
            header = cells
        elif not cells:
            header = []
        elif header and not cells[0].startswith("---"):
            numbers = [float(one.replace(",", "")) for one in re.findall(r"[\d.,]*\d", cells[header.index(column)])]
            yield Bar(cells[0], numbers[0], min(numbers), max(numbers))


def chart(title: str, bars: list[Bar], top: int, *, own: str) -> tuple[list[str], int]:
    """The elements of one chart, and where the next one begins."""
    most = max(bar.high for bar in bars)
    parts = [f'<text x="10" y="{top + 16}" font-weight="600">{title}</text>']
    for number, (label, mean, low, high) in enumerate(bars):
        y = top + 28 + number * GAP
        scale = BAR / most
        color = OWN if label.startswith(own) else OTHER
        parts += [
            f'<text x="10" y="{y + 12}">{label}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{mean * scale:.1f}" height="14" fill="{color}"/>',
            f'<path d="M{LABEL + low * scale:.1f} {y + 7}H{LABEL + high * scale:.1f}" stroke="{INK}"/>',
            f'<text x="{LABEL + high * scale + 6:.1f}" y="{y + 12}">{mean:,.0f}</text>',
        ]
    return parts, top + 28 + len(bars) * GAP + 14


def main() -> None:
    """Write the picture."""
    policies, below = chart("First token, p95 in ms, of a mix of requests", list(rows("router", "p95 ms")), 0, own="kv")
    costs = [bar._replace(label=f"{bar.label} workers") for bar in rows("workers", "p50 us")]
    growth, end = chart("CPU time of a placement, median in us", costs, below, own="")
    body = "\n".join(policies + growth)
    (FOLDER / "routing_scale.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{end}" viewBox="0 0 {WIDTH} {end}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{end}" fill="#fff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
