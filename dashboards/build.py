"""`make dashboards`: write every dashboard's JSON into `json/`, where Grafana's provisioning and the tests find it."""

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import kv_cache, overview, router, workers

FOLDER = Path(__file__).with_name("json")


def documents() -> dict[str, str]:
    """File name and text of every dashboard."""
    boards = [module.BOARD for module in (overview, kv_cache, workers, router)]
    return {f"{board.uid}.json": _text(board.build()) for board in boards}


def main() -> None:
    """Write the files and say which."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in documents().items():
        (FOLDER / name).write_text(text)
        print(f"dashboards/json/{name}")


def _text(board: dict[str, Any]) -> str:
    """JSON with a line for each panel and for each other field, so that a diff has one line for each panel that changed."""
    fields = [f"{json.dumps(name)}: {_field(name, value)}" for name, value in board.items()]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _field(name: str, value: object) -> str:
    plain = json.loads(json.dumps(value, cls=JSONEncoder))
    if name != "panels":
        return json.dumps(plain)
    # The title comes first, where a reader looks for it.
    panels = [json.dumps({"title": panel["title"], **panel}) for panel in plain]
    return "[\n" + ",\n".join(panels) + "\n]"


if __name__ == "__main__":
    main()
