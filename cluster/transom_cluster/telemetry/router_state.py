"""The router's gauges that are read at each scrape: numbers of requests and workers, and the versions of the process's software."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from transom_core.telemetry.build_versions import build_info, build_versions
from transom_core.telemetry.own_labels import OwnLabels


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """The state of a router at one moment.

    `num_waiting` counts the requests that no worker has, and `num_tasks` the asyncio tasks of the router's event loop.
    `desired_workers` is None without autoscaling.
    """

    num_waiting: int
    num_tasks: int
    workers_by_state: Mapping[str, int]
    in_flight_by_worker: Mapping[str, int]
    workers_by_identity: Mapping[str, int] = field(default_factory=dict)  # counts only workers that take requests
    desired_workers: int | None = None


class StateCollector(Collector):
    """Calls `read` at each scrape and makes gauges from its result, so that a lost worker's series disappear at once."""

    def __init__(self, own: OwnLabels, read: Callable[[], RouterState] | None) -> None:
        self._read = read
        self._own = own
        self._versions = build_versions("ray")

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        if self._read is not None:
            yield from self._of_router(self._read())
        yield build_info(self._own, self._versions)

    def _of_router(self, state: RouterState) -> Iterator[Metric]:
        yield self._own.gauge("transom_router_waiting_requests", "Requests that no worker has.", state.num_waiting)
        yield self._own.gauge("transom_router_tasks", "Tasks of the router's event loop.", state.num_tasks)
        yield self._own.gauges(
            "transom_router_workers",
            "Workers by state: open, closed (starting or lost), draining.",
            ("state",),
            [((name,), count) for name, count in state.workers_by_state.items()],
        )
        yield self._own.gauges(
            "transom_router_worker_identities",
            "Workers that take requests, by the identity of their model.",
            ("identity",),
            [((identity,), count) for identity, count in state.workers_by_identity.items()],
        )
        yield self._own.gauges(
            "transom_router_in_flight_requests",
            "Requests that a worker has from this router.",
            ("worker",),
            [((worker,), count) for worker, count in state.in_flight_by_worker.items()],
        )
        if state.desired_workers is not None:
            yield self._own.gauge(
                "transom_router_desired_workers",
                "Workers that the autoscaling policy would ask for by the loads that this router knows.",
                state.desired_workers,
            )
