"""`make dashboards`: write every dashboard's JSON into `json/`, where Grafana's provisioning and the tests find it."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import kv_cache, overview, router, workers

FOLDER = Path(__file__).with_name("json")


def documents() -> dict[str, str]:
    """File name and text of every dashboard."""
    boards = [module.build() for module in (overview, kv_cache, workers, router)]
    return {f"{board.uid}.json": json.dumps(board.build(), cls=JSONEncoder, indent=2) + "\n" for board in boards}


def main() -> None:
    """Write the files and say which."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in documents().items():
        (FOLDER / name).write_text(text)
        print(f"dashboards/json/{name}")


if __name__ == "__main__":
    main()
