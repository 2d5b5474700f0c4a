"""With which statuses requests at each endpoint may end: what the API's document says, and what stands before every route.

Their counts are on the page of metrics from the start, so that `rate` and `increase` see the first error of a kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.routing import BaseRoute

from transom_cluster.http.api_keys import shows_all_clients
from transom_cluster.telemetry.request_outcome import CLIENT_DISCONNECTED_STATUS
from transom_worker.config import ServerConfig

OTHER = "other"  # the endpoint of paths that do not exist
_EVERYWHERE = (
    200,
    401,
    405,
    413,
    431,
    CLIENT_DISCONNECTED_STATUS,
    500,
)  # 413: whoever looks (GET) may send a body, too
_OF_OTHERS = (401, 404, 413, 429, 431, 500)
_HIDDEN: Mapping[str, tuple[int, ...]] = {  # routes that the document leaves out
    "/blocks": (304, 404),
    "/blocks/assets/{name}": (304, 404),
    "/blocks/demo.bin": (304, 404),
    "/blocks/stream": (400, 404),
    "/blocks/describe": (400, 404, 503),
}


def declared_statuses(
    routes: Iterable[BaseRoute], document: Mapping[str, Any], config: ServerConfig
) -> dict[str, list[int]]:
    """Statuses by the route's path, those that these settings rule out left away."""
    never = _never(config)
    known = {OTHER: set(_OF_OTHERS)}
    for route in routes:
        path, written = getattr(route, "path", OTHER), getattr(route, "path_format", "")
        documented = [
            int(status)
            for operation in document["paths"].get(written, {}).values()
            for status in operation["responses"]
        ]
        for_admins = (403,) if config.admin_api_key_file and shows_all_clients(path) else ()
        known.setdefault(path, set()).update(_EVERYWHERE, documented, _HIDDEN.get(path, ()), for_admins)
    return {path: sorted(statuses - never) for path, statuses in known.items()}


def _never(config: ServerConfig) -> set[int]:
    limits = config.limits
    possible = {
        401: bool(config.api_keys or config.api_key_file or config.admin_api_key_file),
        408: limits.request_timeout_s is not None,
        429: limits.requests_per_minute is not None or limits.concurrent_requests is not None,
    }
    return {status for status, is_possible in possible.items() if not is_possible}
