"""Prometheus' HTTP service discovery: each process as a target of its own, all behind the address that was asked.

So no process needs a port that Prometheus can reach, and API keys hold for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transom_cluster.http.public_address import PublicAddress

PROCESS_PATH = "/metrics/process"


def discovery(names: Iterable[str], *, at: PublicAddress, model: str) -> list[dict[str, Any]]:
    """The document for processes by their names (`router/ID`, `worker/ID`).

    Pages have labels `model`, `router` and `worker` themselves, so targets carry none of these. Labels that begin with `__meta_`
    are for relabelling. `__scheme__` is told only where it is certain: the job's own `scheme` holds elsewhere.
    """
    shared = {"__metrics_path__": at.prefix + PROCESS_PATH, "__meta_transom_model": model}
    if at.is_https:
        shared["__scheme__"] = "https"
    return [
        {
            "targets": [at.host],
            "labels": {
                **shared,
                "__param_name": name,
                "instance": name,
                "__meta_transom_kind": name.partition("/")[0],
                "__meta_transom_id": name.partition("/")[2],
            },
        }
        for name in names
    ]
