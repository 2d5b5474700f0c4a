#!/usr/bin/env python3
"""Draw the README's plot of prefix hits from the table of docs/cache_simulation.md: `python docs/images/plots.py`."""

import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "cache_simulation.md"
TITLE = "Prompt tokens found in the prefix cache when memory is short, percent"
WIDTH, LABEL, BAR, GAP = 760, 230, 420, 22
OWN, OTHER, INK = "#2563eb", "#a8b0ba", "#1f2328"


def table() -> Iterator[dict[str, str]]:
    """The rows, by column, of the table of cases that has vLLM's shares."""
    header: list[str] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells[:1] == ["case"] and "vLLM" in cells:
            header = cells
        elif not cells:
            header = []
        elif header and not cells[0].startswith("---"):
            yield dict(zip(header, cells, strict=True))


def numbers(cell: str) -> list[float]:
    """The numbers of a cell."""
    return [float(one) for one in re.findall(r"[\d.]*\d", cell)]


def bars() -> Iterator[tuple[str, float, str]]:
    """Label, percent and colour of two bars for each case: Transom's own policy, and the better mode of vLLM's cache classes."""
    for row in table():
        yield row["case"], numbers(row["own policy"])[0], OWN  # hits; the number after the plus sign was repaired
        yield "vLLM 0.32 classes", max(numbers(row["vLLM"]) + numbers(row["dense"])), OTHER


def main() -> None:
    """Write the picture."""
    drawn = list(bars())
    most = max(percent for _, percent, _ in drawn)
    height = 28 + len(drawn) * GAP + 14
    parts = [f'<text x="10" y="16" font-weight="600">{TITLE}</text>']
    for number, (label, percent, color) in enumerate(drawn):
        y, length = 28 + number * GAP, BAR * percent / most
        parts += [
            f'<text x="10" y="{y + 12}">{label}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="14" fill="{color}"/>',
            f'<text x="{LABEL + length + 6:.1f}" y="{y + 12}">{percent:.1f}</text>',
        ]
    body = "\n".join(parts)
    (FOLDER / "prefix_hits.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
