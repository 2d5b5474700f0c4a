"""Lists the status codes that requests at each endpoint may end with.

They are the statuses in the OpenAPI document, and those that the middleware sends before a request reaches its route. The metrics
page shows a count of 0 for each of them from the start, so that Prometheus' `rate` and `increase` see the first error of a kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.routing import BaseRoute

from transom_cluster.http.api_keys import needs_admin_key
from transom_cluster.telemetry.request_outcome import CLIENT_DISCONNECTED_STATUS
from transom_core.config import ServerConfig

OTHER = "other"  # the endpoint under which paths that do not exist are counted
_AT_EVERY_ROUTE = (200, 401, 405, 413, 429, 431, CLIENT_DISCONNECTED_STATUS, 500)  # 413: a GET may have a body, too
_AT_OTHER_PATHS = (401, 404, 413, 429, 431, 500)
_UNDOCUMENTED: Mapping[str, tuple[int, ...]] = {  # statuses of routes that the OpenAPI document leaves out
    "/blocks": (304, 404),
    "/blocks/assets/{name}": (304, 404),
    "/blocks/demo.bin": (304, 404),
    "/blocks/stream": (400, 404),
    "/blocks/describe": (400, 404, 503),
    "/transfers/measure": (400, 404, 503),
}


def declared_statuses(
    routes: Iterable[BaseRoute], document: Mapping[str, Any], config: ServerConfig
) -> dict[str, list[int]]:
    """Return the statuses by the route's path, without those that cannot occur with these settings."""
    impossible = _impossible_statuses(config)
    has_keys, has_admins = bool(config.api_keys or config.api_key_file), bool(config.admin_api_key_file)
    declared = {OTHER: set(_AT_OTHER_PATHS)}
    for route in routes:
        path, documented_path = getattr(route, "path", OTHER), getattr(route, "path_format", "")
        documented = [
            int(status)
            for operation in document["paths"].get(documented_path, {}).values()
            for status in operation["responses"]
        ]
        for_admins = (403,) if needs_admin_key(path, has_keys=has_keys, has_admins=has_admins) else ()
        declared.setdefault(path, set()).update(_AT_EVERY_ROUTE, documented, _UNDOCUMENTED.get(path, ()), for_admins)
    return {path: sorted(statuses - impossible) for path, statuses in declared.items()}


def _impossible_statuses(config: ServerConfig) -> set[int]:
    has_keys = config.api_keys or config.api_key_file or config.admin_api_key_file
    return set() if has_keys else {401}
