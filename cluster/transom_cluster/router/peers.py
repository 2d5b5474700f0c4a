"""Queries between the routers of one application.

A client's request reaches any one of the routers, so a page about the whole cluster needs data from the other routers.

- **peer**: another router of the same application.
- **query**: one question to a router: a function of this module, with arguments that can be sent to another process. It reads the
  router that it is given and changes nothing, but for `exchange_adapters`. For example, `process_name(router)` is `"router/r0"` at
  the router with the id `r0`.

A router makes its own part of a page with `query(router)`, and gets the other routers' parts with `router.peers.ask_others`:

    query = partial(metrics_page, openmetrics=True)
    pages = [query(router), *await router.peers.ask_others(query, timeout_s=2.0)]
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from transom_cluster.router.adapter_registry import AdapterChange, AdapterRegistry
from transom_cluster.telemetry.request_timeline import RequestTimelines
from transom_cluster.telemetry.router_metrics import RouterMetrics

T = TypeVar("T")


class QueriedRouter(Protocol):
    """The parts of a router that queries read."""

    router_id: str
    metrics: RouterMetrics
    timelines: RequestTimelines
    adapters: AdapterRegistry


PeerQuery = Callable[[QueriedRouter], T]


def metrics_page(router: QueriedRouter, *, openmetrics: bool) -> str:
    """Return the metrics page of this router only, in Prometheus' text format or in OpenMetrics' format."""
    return router.metrics.text(openmetrics=openmetrics)


def process_name(router: QueriedRouter) -> str:
    """Return the router's name among all processes of the cluster: `router/{router id}`."""
    return f"router/{router.router_id}"


def process_metrics_page(router: QueriedRouter, *, process: str, openmetrics: bool) -> str | None:
    """Return the router's metrics page if its name is `process`, else None."""
    return metrics_page(router, openmetrics=openmetrics) if process == process_name(router) else None


def request_timeline(router: QueriedRouter, *, request_id: str, client: str) -> dict[str, Any] | None:
    """Return the router's part of the timeline of a client's request as JSON values; None if the router does not know the request,
    or has forgotten it."""
    return router.timelines.find(request_id, client)


def recent_requests(router: QueriedRouter, *, client: str, state: str | None, limit: int) -> list[dict[str, Any]]:
    """Return a summary for each of a client's `limit` newest requests, newest first; `state`: `running`, `finished`, or None for
    both."""
    return router.timelines.summaries(client, state, limit)


def exchange_adapters(router: QueriedRouter, *, changes: Mapping[str, AdapterChange]) -> dict[str, AdapterChange]:
    """Tell a router which LoRA adapters were loaded and unloaded elsewhere, and return what it knows itself."""
    router.adapters.merge(changes)
    return router.adapters.changes


class RouterPeers(Protocol):
    """The other routers of the application."""

    async def ask_others(self, query: PeerQuery[T], *, timeout_s: float) -> list[T | BaseException]:
        """Send a query to every other router, and return their answers, or exceptions for routers that failed or were late.

        Routers that are being stopped are not asked. The call never raises, and takes little longer than `timeout_s`.
        """


class NoPeers:
    """The peers of a router that has none."""

    async def ask_others(self, query: PeerQuery[T], *, timeout_s: float) -> list[T | BaseException]:
        """Return an empty list."""
        return []
