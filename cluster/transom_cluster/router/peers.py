"""Queries between the routers of one application.

A client's request reaches any one of the routers, so a page about the whole cluster needs data from the other routers.

- **peer**: another router of the same application.
- **query**: one question to a router, as plain data that can be sent to another process. Its method `answer` reads the router that
  it is given and changes nothing. For example, `ProcessNameQuery().answer(router)` is `"router/r0"` at the router with the id `r0`.

A router makes its own part of a page with `query.answer(router)`, and gets the other routers' parts with
`router.peers.ask_others(query, timeout_s=2.0)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from transom_cluster.telemetry.request_timeline import RequestTimelines
from transom_cluster.telemetry.router_metrics import RouterMetrics

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class QueriedRouter(Protocol):
    """The parts of a router that queries read."""

    router_id: str
    metrics: RouterMetrics
    timelines: RequestTimelines


class PeerQuery(Protocol[T_co]):
    """A question whose answer has the type `T_co`."""

    def answer(self, router: QueriedRouter) -> T_co:
        """Read the answer from `router`."""


@dataclass(frozen=True, slots=True)
class MetricsQuery:
    """Asks for a router's metrics page, in Prometheus' text format or in OpenMetrics' format."""

    openmetrics: bool

    def answer(self, router: QueriedRouter) -> str:
        """Return the page of this router only."""
        return router.metrics.text(openmetrics=self.openmetrics)


@dataclass(frozen=True, slots=True)
class ProcessNameQuery:
    """Asks for a router's name among all processes of the cluster."""

    def answer(self, router: QueriedRouter) -> str:
        """Return `router/{router id}`."""
        return f"router/{router.router_id}"


@dataclass(frozen=True, slots=True)
class ProcessMetricsQuery:
    """Asks for the metrics page of the process with the name `process`."""

    process: str
    openmetrics: bool

    def answer(self, router: QueriedRouter) -> str | None:
        """Return the router's page; None if the router has another name."""
        if self.process != ProcessNameQuery().answer(router):
            return None
        return MetricsQuery(self.openmetrics).answer(router)


@dataclass(frozen=True, slots=True)
class TimelineQuery:
    """Asks for a router's part of the timeline of one request of a client."""

    request_id: str
    client: str

    def answer(self, router: QueriedRouter) -> dict[str, Any] | None:
        """Return the part as JSON values; None if the router does not know the request, or has forgotten it."""
        return router.timelines.find(self.request_id, self.client)


@dataclass(frozen=True, slots=True)
class RecentRequestsQuery:
    """Asks for a client's `limit` newest requests; `state`: `running`, `finished`, or None for both."""

    client: str
    state: str | None
    limit: int

    def answer(self, router: QueriedRouter) -> list[dict[str, Any]]:
        """Return one summary per request, newest first."""
        return router.timelines.summaries(self.client, self.state, self.limit)


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
