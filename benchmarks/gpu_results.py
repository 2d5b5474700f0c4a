"""Results as JSON, which keeps everything, and as Markdown tables, which show what matters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a part has to say: its results, where these leave the promises, and a table for readers."""

    results: Sequence[Result]
    table: str
    targets: Sequence[Result] = ()


def write(folder: Path, name: str, *, about: Mapping[str, Any], report: Report) -> Path:
    """`name`.json and `name`.md in the folder, whole or not at all; the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    whole = {"schema": SCHEMA, "part": name, **about, "targets": list(report.targets), "results": list(report.results)}
    parts = (f"# {name}", _facts(about), _target_table(report.targets), report.table)
    _replace(path, json.dumps(whole, indent=1, default=str) + "\n")
    _replace(path.with_suffix(".md"), "\n\n".join(part for part in parts if part) + "\n")
    return path


def _replace(path: Path, text: str) -> None:
    """A reader, or who ends this process, never meets half of it."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text)
    beside.replace(path)


def _target_table(targets: Sequence[Result]) -> str:
    names = ("target", "wanted", "figure", "status", "cases", "at")
    return markdown(names, [[row[name] for name in names] for row in targets]) if targets else ""


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
