"""`RequestState`: what the middleware and the routes know about the HTTP request that they handle, in one typed object.

`RequestMiddleware`, the outermost layer, creates the object and stores it in the ASGI scope. Inner layers and routes read it with
`request_state`.
"""

import time
from dataclasses import dataclass, field

from starlette.types import Scope

from transom_cluster.telemetry.request_outcome import RequestOutcome
from transom_cluster.telemetry.request_timeline import ONLY_CLIENT, RequestTimeline
from transom_cluster.telemetry.router_tracing import RequestTrace

STATE_KEY = "transom"


@dataclass(slots=True, kw_only=True)
class RequestState:
    """The state of one HTTP request.

    Later layers set the fields that are empty at first: `AdmissionMiddleware` sets `client`, `sharer` and `weight`. A route sets
    `response_id` at once, and `engine_request_id` (of the first choice) and `timeline` after the prompt is tokenised.
    """

    x_request_id: str  # the header that the client or Ray Serve sent; empty if there was none
    trace: RequestTrace | None  # None: the request has no span
    arrival_s: float = field(default_factory=time.monotonic)  # when this object was created (monotonic clock)
    outcome: RequestOutcome = field(default_factory=RequestOutcome)  # how the response ended; metrics read it
    client: str = ONLY_CLIENT  # the API key's owner, who may see the timeline; without keys one client for all
    sharer: str = ""  # who takes turns in queues: the API key's owner, or a digest of the address; empty: unknown
    weight: float = 1.0  # the sharer's share of a queue's turns is proportional to its weight
    response_id: str = ""
    engine_request_id: str = ""
    timeline: RequestTimeline | None = None

    @property
    def counted_as(self) -> str:
        """Return the caller whose limits count this request: the sharer, or `ONLY_CLIENT` if the address is unknown."""
        return self.sharer or self.client

    @property
    def age_s(self) -> float:
        """Return the seconds since the request arrived, including the time to receive its body and to tokenise its prompt."""
        return time.monotonic() - self.arrival_s


def request_state(scope: Scope) -> RequestState:
    """Return the state of the request that `scope` belongs to."""
    state: RequestState = scope["state"][STATE_KEY]
    return state


def routed_path(scope: Scope) -> str:
    """Return a request's path in the form that route patterns match.

    The result excludes the prefix at which the app is mounted (Ray Serve's `route_prefix`). It excludes a final line feed, too,
    because patterns end in `$`, which also matches before a final line feed.
    """
    path: str = scope["path"]
    inside = path.removeprefix(scope.get("root_path", ""))
    return (inside if inside.startswith("/") else path).removesuffix("\n")
