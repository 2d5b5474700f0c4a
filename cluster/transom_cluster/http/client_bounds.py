"""Everything in a router that clients can fill, with its bound in bytes: `client_bounds`.

A client decides how often it sends what: new texts, keys, sizes, bodies, and whether it reads its answers. Whatever remembers or
queues that has a row here; a test fills all rows over HTTP and compares. Other things bound the rest: the operator's settings
(keys), the model (the tokenizer's table of tokens; the starts of window repairs, `hit_rules.MAX_REPAIRS`), the workers (prefix
index, pages of metrics), or the request itself (an answer that is not read: its own tokens).

A cache gives a client a quarter at most (`FairCache`). A queue takes new requests of a client until it is full, and then displaces
those of the client with most. Sizes are counted with the bytes that an entry was measured to take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from transom_cluster.http.client_limits import HELD_BODY_BYTES, MAX_IDLE_CLIENTS, LimitSet
from transom_cluster.router.client_turns import MAX_ACCOUNTS
from transom_cluster.router.request_queue import MAX_WAITING, MAX_WAITING_TOKENS, TOKEN_BYTES, WAITING_REQUEST_BYTES
from transom_cluster.router.router import Router
from transom_core.fair_cache import CLIENT_SHARE
from transom_core.telemetry.request_timelines import MAX_EVENTS, MAX_TIMELINES

ENTRY_BYTES = 300  # of a client in a table
EVENT_BYTES = 350  # of a timeline
LONGEST_PROMPTS = 2**21 * TOKEN_BYTES  # of the request that fills the queue


@dataclass(frozen=True, slots=True)
class ClientBound:
    """One place that clients can fill. `share` is what one client can have of it while there are others: a part of the bound, or
    "displaced" where it makes room for others. `num_bytes` returns what is there now."""

    name: str
    max_bytes: int
    share: float | Literal["displaced"]
    num_bytes: Callable[[], int]


def client_bounds(router: Router, limits: LimitSet) -> tuple[ClientBound, ...]:
    """Return all places of a router that clients can fill."""
    keys, verdicts = router.placer.cache_keys.workers, router.grammar_checker.kept
    queue, timelines = router.queue, router.timelines
    waiting_bytes = MAX_WAITING * WAITING_REQUEST_BYTES + MAX_WAITING_TOKENS * TOKEN_BYTES + LONGEST_PROMPTS
    return (
        ClientBound("bodies of requests that run", HELD_BODY_BYTES, 1 / 2, lambda: limits.bodies.num_bytes),
        ClientBound("verdicts on grammars", verdicts.max_bytes, CLIENT_SHARE, lambda: verdicts.num_bytes),
        ClientBound("workers of cache keys", keys.max_bytes, CLIENT_SHARE, lambda: keys.num_bytes),
        ClientBound("requests that wait", waiting_bytes, "displaced", lambda: queue.waiting_bytes),
        ClientBound(
            "timelines",
            MAX_TIMELINES * MAX_EVENTS * EVENT_BYTES,
            "displaced",
            lambda: timelines.num_events * EVENT_BYTES,
        ),
        ClientBound(
            "accounts of clients", MAX_ACCOUNTS * ENTRY_BYTES, "displaced", lambda: queue.num_accounts * ENTRY_BYTES
        ),
        ClientBound(
            "limits of clients",
            6 * (MAX_IDLE_CLIENTS + 1) * ENTRY_BYTES,
            "displaced",
            lambda: limits.num_entries * ENTRY_BYTES,
        ),
    )
