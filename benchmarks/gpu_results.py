"""Results as JSON, which keeps everything, and as Markdown tables, which show what matters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1

Result = Mapping[str, Any]


def write(folder: Path, name: str, *, about: Mapping[str, Any], results: Sequence[Result], table: str) -> Path:
    """`name`.json and `name`.md in the folder; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    whole = {"schema": SCHEMA, "part": name, **about, "results": list(results)}
    path.write_text(json.dumps(whole, indent=1, default=str) + "\n")
    path.with_suffix(".md").write_text(f"# {name}\n\n{_facts(about)}\n\n{table}\n")
    return path


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; numbers get three digits."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def tally(results: Sequence[Result]) -> str:
    """How many results have which status, worst first."""
    order = ("wrong", "crashed", "failed", "timed out", "missed", "skipped", "passed")
    counts = {status: sum(result["status"] == status for result in results) for status in order}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "nothing ran"


def is_sound(results: Sequence[Result]) -> bool:
    """Whether nothing was wrong or broke; a missed target is a figure, not a failure."""
    return not any(result["status"] in ("wrong", "crashed", "failed", "timed out") for result in results)


def _facts(about: Mapping[str, Any]) -> str:
    chip = about.get("device", {}).get("name", "?")
    versions = ", ".join(f"{name} {found}" for name, found in about.get("versions", {}).items())
    return f"{chip}, driver {about.get('driver') or '?'}; {versions}; commit {about.get('commit') or '?'}, {about.get('date')}."


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
