"""The committed dashboards, and what is in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "dashboards/json"


def dashboards() -> list[dict[str, Any]]:
    """All of them."""
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """A dashboard's panels that show something, those of folded rows included."""
    return [one for panel in board["panels"] for one in (panel, *panel.get("panels", [])) if one["type"] != "row"]


def all_queries(board: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Panel's title, expression and legend of every query."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def variables(board: dict[str, Any]) -> dict[str, bool]:
    """Every variable, and whether it is hidden."""
    return {one["name"]: one.get("hide") == 2 for one in board["templating"]["list"]}
