"""Prometheus' HTTP service discovery: each process becomes a scrape target behind the API's own address.

No process therefore needs a port that Prometheus can reach, and API keys hold for all targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transom_cluster.http.public_address import PublicAddress

PROCESS_PATH = "/metrics/process"


def discovery(names: Iterable[str], *, at: PublicAddress, model: str) -> list[dict[str, Any]]:
    """Build the discovery document for processes by their names (`router/ID`, `worker/ID`).

    The metrics pages have the labels `model`, `router` and `worker` themselves, so targets carry none of these. Labels that begin
    with `__meta_` are for relabelling. A target has `__scheme__` only if TLS is certain; else the scrape job's own `scheme` holds.
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
