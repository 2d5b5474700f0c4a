#!/usr/bin/env python3
"""Draw the documents' plots from their own tables: prefix hits (docs/cache_simulation.md), and routing at scale (docs/routing.md).

    python docs/images/plots.py

A bar is a table's figure, or the mean of several seeds, with a line over it from the least to the largest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
HITS, ROUTING = FOLDER.parent / "cache_simulation.md", FOLDER.parent / "routing.md"
WIDTH, LABEL, BAR, GAP = 760, 230, 420, 22
OWN, OTHER, INK = "#2563eb", "#a8b0ba", "#1f2328"


class Bar(NamedTuple):
    """One figure, with its range, and its label."""

    label: str
    mean: float
    low: float
    high: float
    is_own: bool = False


def tables(page: Path, first_cell: str, column: str) -> Iterator[dict[str, str]]:
    """The rows, by column, of the table whose header begins with `first_cell` and has `column`."""
    header: list[str] = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[:1] == [first_cell] and column in cells:
            header = cells
        elif not cells:
            header = []
        elif header and not cells[0].startswith("---"):
            yield dict(zip(header, cells, strict=True))


def numbers(cell: str) -> list[float]:
    """The numbers of a cell, such as 289, 237 and 317 of `289 (237 to 317)`."""
    return [float(one.replace(",", "")) for one in re.findall(r"[\d.,]*\d", cell)]


def bars(page: Path, first_cell: str, column: str, *, own: str, label: str = "{}") -> list[Bar]:
    """A bar for each row of a table; those whose first cell begins with `own` are Transom's."""
    return [
        Bar(label.format(row[first_cell]), found[0], min(found), max(found), row[first_cell].startswith(own))
        for row in tables(page, first_cell, column)
        if (found := numbers(row[column]))
    ]


def hit_bars() -> Iterator[Bar]:
    """Two bars for each case: Transom's own policy, and the better mode of vLLM's cache classes."""
    for row in tables(HITS, "case", "vLLM"):
        own, *_ = numbers(row["own policy"])  # hits; what follows the plus sign was repaired
        rival = max(numbers(row["vLLM"]) + numbers(row["dense"]))
        yield Bar(row["case"], own, own, own, is_own=True)
        yield Bar("vLLM 0.32 classes", rival, rival, rival)


def chart(title: str, bars: Sequence[Bar], top: int, *, digits: int = 0) -> tuple[list[str], int]:
    """The elements of one chart, and where the next one begins."""
    most = max(bar.high for bar in bars)
    parts = [f'<text x="10" y="{top + 16}" font-weight="600">{title}</text>']
    for number, bar in enumerate(bars):
        y = top + 28 + number * GAP
        scale = BAR / most
        parts += [
            f'<text x="10" y="{y + 12}">{bar.label}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{bar.mean * scale:.1f}" height="14" fill="{OWN if bar.is_own else OTHER}"/>',
            f'<path d="M{LABEL + bar.low * scale:.1f} {y + 7}H{LABEL + bar.high * scale:.1f}" stroke="{INK}"/>',
            f'<text x="{LABEL + bar.high * scale + 6:.1f}" y="{y + 12}">{bar.mean:,.{digits}f}</text>',
        ]
    return parts, top + 28 + len(bars) * GAP + 14


def write(name: str, elements: Sequence[str], height: int) -> None:
    """Write one picture."""
    body = "\n".join(elements)
    (FOLDER / name).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    """Write both pictures."""
    title = "Prompt tokens found in the prefix cache when memory is short, percent"
    write("prefix_hits.svg", *chart(title, list(hit_bars()), 0, digits=1))
    policies, below = chart(
        "First token, p95 in ms, of a mix of requests", bars(ROUTING, "router", "p95 ms", own="kv"), 0
    )
    growth, end = chart(
        "CPU time of a placement, median in us",
        bars(ROUTING, "workers", "p50 us", own="", label="{} workers"),
        below,
    )
    write("routing_scale.svg", policies + growth, end)


if __name__ == "__main__":
    main()
