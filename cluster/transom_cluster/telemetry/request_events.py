"""Defines the events of one HTTP request at a router. The router reports each event once, and every sink receives it.

- **choice**: one of the completions of an HTTP request, numbered from 0 over all of its prompts. Each is a separate engine request.
- **attempt**: one try to run a choice at a worker. A choice that migrates has several attempts.
- **event**: one thing that happened, as a frozen dataclass. Its `kind` is its name in `/debug/requests/{id}`.
- **sink**: an object that makes one kind of output from the events: the request's timeline (`request_timeline`), its spans
  (`router_tracing`), or counters (`router_metrics`). The JSON log line of a request is made from its timeline at the end.

The events of a request that migrates once, with two attempts at one choice:

    Arrived  Placed  Sent  Accepted  FirstToken  Lost  Placed  Sent  Accepted(is_migrated)  FirstToken  Finished  Ended
             |------------- attempt 1 --------------|  |--------------------- attempt 2 ---------------------|

A prefill worker's attempt ends with `HandedOver` instead of `Lost`.
`Queued` comes before `Placed` if no worker can take the choice. `TurnedAway` ends an attempt that a worker refused. `Failed`
replaces `Finished` if an error ends the choice. `ClientLeft` may come at any time before `Ended`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol

FailoverOutcome = Literal["resumed", "gave_up", "poison"]
"""What happened to a request whose worker was lost: it migrated, it was given up after too many losses, or it was stopped as a
poison request."""


class ChoiceOutput(Protocol):
    """The output of one choice so far."""

    token_ids: list[int]

    @property
    def num_hit_tokens(self) -> int:
        """Return the number of prompt tokens that the first worker found in its prefix cache; 0 for a prompt's other choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """The request's body was read and its prompts were tokenised."""

    choices: Sequence[ChoiceOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft:
    """The client closed its connection before the response ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The router does nothing more for the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvent:
    """Base class of the events of one choice."""

    kind: ClassVar[str]
    choice: int

    def facts(self) -> dict[str, Any]:
        """Return the event's figures as JSON values: all fields except `choice`, those only for sinks, and those that are None."""
        figures = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NO_FIGURES}
        return {name: value for name, value in figures.items() if value is not None}


_NO_FIGURES = ("choice", "is_migrated", "failover")  # the last two are for sinks; timelines show them by other events


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued(ChoiceEvent):
    """The choice waits in the router's queue, because no worker can take it now; `reason` says why."""

    kind: ClassVar[str] = "waits"
    reason: Literal["suspect", "workers full", "no worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(ChoiceEvent):
    """The routing policy chose a worker, and an attempt begins. `resumed_tokens` is the number of output tokens of earlier
    attempts; None if this is the first attempt.

    Of the predicted hit, `predicted_host_tokens` are in the worker's host tier, `predicted_disk_tokens` on its disk, and
    `predicted_peer_tokens` at the worker from which it fetches them; None stands for 0. The other tokens of the hit are on its
    device.

    If `fetches_from` is not None, the worker fetches the KV of the first `fetched_tokens` tokens from that worker. If
    `prefill_only` is true, the worker computes only the prompt and the first token.
    """

    kind: ClassVar[str] = "placed"
    worker: str
    policy: str
    reason: str
    predicted_hit_tokens: int
    predicted_host_tokens: int | None = None
    predicted_disk_tokens: int | None = None
    predicted_peer_tokens: int | None = None
    resumed_tokens: int | None = None
    fetches_from: str | None = None
    fetched_tokens: int | None = None
    prefill_only: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(ChoiceEvent):
    """The router sends the attempt to its worker; the attempt waited `waited_s` seconds in the router's queue."""

    kind: ClassVar[str] = "sent"
    worker: str | None
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(ChoiceEvent):
    """The worker has queued the attempt. `is_migrated` is true if the choice ran at another worker before, which was lost."""

    kind: ClassVar[str] = "accepted"
    worker: str | None
    is_migrated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway(ChoiceEvent):
    """The worker refused the attempt with an error of this class; the router tries another worker."""

    kind: ClassVar[str] = "turned_away"
    worker: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken(ChoiceEvent):
    """The first token of an attempt has come. `hit_tokens` counts the prompt tokens that this worker found in its prefix cache."""

    kind: ClassVar[str] = "first_token"
    worker: str | None
    hit_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver(ChoiceEvent):
    """A prefill worker has computed the prompt and the first token; a decode worker continues."""

    kind: ClassVar[str] = "handed_over"
    worker: str
    tokens_so_far: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(ChoiceEvent):
    """The attempt cannot continue at its worker; `cause` is one of `router.failover.Cause`.

    `loss_cause` is the cause of the worker's loss (`errors.LossCause`), or None if the worker was not lost.
    """

    kind: ClassVar[str] = "lost"
    worker: str
    cause: str
    tokens_so_far: int
    loss_cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(ChoiceEvent):
    """The choice is complete."""

    kind: ClassVar[str] = "finished"
    reason: str
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(ChoiceEvent):
    """An error of this class ended the choice; the message is left out, since it may quote a prompt.

    `failover` says why a choice was not sent to another worker after a loss.
    """

    kind: ClassVar[str] = "failed"
    error: str
    tokens_so_far: int
    failover: FailoverOutcome | None = None


RequestEvent = Arrived | ChoiceEvent | ClientLeft | Ended


class RequestEventSink(Protocol):
    """Receives the events of requests."""

    def receive(self, event: RequestEvent) -> None:
        """Take note of an event. Called on the router's event loop, in the order of the events."""


class SpanSink(RequestEventSink, Protocol):
    """The sink that makes the spans of one request."""

    def trace_parent(self, choice: int) -> str:
        """Return the traceparent header of the present attempt's span, for the worker's own spans."""


class RequestEvents:
    """The event stream of one HTTP request: hands every reported event to each sink."""

    def __init__(self, *sinks: RequestEventSink, spans: SpanSink | None = None) -> None:
        self._sinks = sinks if spans is None else (*sinks, spans)
        self._spans = spans

    def report(self, event: RequestEvent) -> None:
        """Hand an event to each sink."""
        for sink in self._sinks:
            sink.receive(event)

    def trace_parent(self, choice: int) -> str | None:
        """Return the traceparent header for the worker that has the present attempt; None if the request is not traced."""
        return None if self._spans is None else self._spans.trace_parent(choice)
