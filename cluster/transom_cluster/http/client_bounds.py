"""`client_bounds`: lists everything in a router that clients can fill, each with its bound in bytes.

Clients decide what they send and how often (new texts, keys, sizes, bodies), and whether they read their answers. Every table or
queue that keeps such data has a row here; a test fills all rows over HTTP and compares. The rest of a router's memory is bounded by
the operator's settings (keys), the model (the tokenizer's table of tokens; the starts of window repairs, `hit_rules.MAX_REPAIRS`),
the workers (prefix index, metrics pages), or the request itself (an answer that is not read: its own tokens).

A cache gives one client at most a quarter (`FairCache`). A queue takes a client's new requests until it is full, and then displaces
requests of the client that has most. Sizes are computed from the measured bytes per entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from transom_cluster.http.client_limits import HELD_BODY_BYTES, MAX_IDLE_CLIENTS, LimitSet
from transom_cluster.router.request_queue import MAX_WAITING, MAX_WAITING_TOKENS, TOKEN_BYTES, WAITING_REQUEST_BYTES
from transom_cluster.router.router import Router
from transom_core.fair_cache import CLIENT_SHARE
from transom_core.telemetry.request_timelines import MAX_EVENTS, MAX_TIMELINES
from transom_core.virtual_time import MAX_ACCOUNTS

ENTRY_BYTES = 300  # an entry for a client in a table
EVENT_BYTES = 350  # an event of a timeline
LONGEST_PROMPTS = 2**21 * TOKEN_BYTES  # the last request before the queue is full may exceed the bound by its prompts


@dataclass(frozen=True, slots=True)
class ClientBound:
    """One place that clients can fill. `num_bytes` returns its present size.

    `share` is the part of the bound that one client can use while there are others, or "displaced" if its entries make room for
    those of others.
    """

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
