"""`InFlightRequest`: one choice of an HTTP request on its way through one or several workers, with its output so far.

- **in-flight request**: one choice of an HTTP request, from its submission to its last event.
- **attempt**: one try to compute the choice at a worker. Each attempt has its own request id (`r`, then `r+1`, `r+2`, ...), so that
  events of an earlier attempt are not mistaken for those of the present one.
- **migration**: a new attempt at another worker after a loss. It resumes after the tokens that have come so far.

Events have positions, because a migrated request may repeat output. For example, 5 tokens have come, and an event has the tokens
[3, 7): the tokens [5, 7) are new. If the event began at position 6, token 5 would be missing, so the request is sent to a worker
again.

`AttemptState` has the states of a request and the transitions between them. All code here runs on the router's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum

from transom_cluster.router.failover import LossRecord
from transom_cluster.router.output_stream import OutputStream, error_event, without_first
from transom_cluster.routing.placer import PlacementDecision
from transom_cluster.telemetry.request_events import (
    Accepted,
    Failed,
    FailoverOutcome,
    Finished,
    FirstToken,
    Placed,
    RequestEvents,
    Sent,
)
from transom_core.config import SchedulingPolicy
from transom_core.contract import ErrorInfo, OutputEvent, Request, Usage
from transom_core.contract.request import virtual_arrival_s


class AttemptState(Enum):
    """The state of a request's present attempt.

        WAITING --place--> PLACED --send--> SENT --the worker replies--> ACCEPTED
           ^                                  |                             |
           |                                  +---------the first event-----+--> STREAMING --the last event--> ENDED

    A request whose worker refuses it or is lost goes back to WAITING. A request may end in every state.
    """

    WAITING = "waiting"  # in the request queue: no worker has it
    PLACED = "placed"  # a worker was chosen, but the attempt has not been sent yet
    SENT = "sent"  # the worker may have the attempt, but has not replied
    ACCEPTED = "accepted"  # the worker has queued it
    STREAMING = "streaming"  # an event has come
    ENDED = "ended"  # no more output comes


# State -> the states that may follow.
TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.WAITING: frozenset({AttemptState.PLACED, AttemptState.ENDED}),
    AttemptState.PLACED: frozenset({AttemptState.SENT, AttemptState.WAITING, AttemptState.ENDED}),
    AttemptState.SENT: frozenset(
        {AttemptState.ACCEPTED, AttemptState.STREAMING, AttemptState.WAITING, AttemptState.ENDED}
    ),
    AttemptState.ACCEPTED: frozenset({AttemptState.STREAMING, AttemptState.WAITING, AttemptState.ENDED}),
    AttemptState.STREAMING: frozenset({AttemptState.WAITING, AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}
_AT_A_WORKER = (AttemptState.SENT, AttemptState.ACCEPTED, AttemptState.STREAMING)


class InFlightRequest:
    """One choice of an HTTP request. It passes new output to the request's output stream, and reports what happens to the choice.

    `original` is the choice as it was submitted, and `attempt` is the request that the present worker has. `token_ids` has all
    output tokens so far; `num_new_tokens` of them came from the present attempt.
    """

    def __init__(
        self, output: OutputStream, index: int, original: Request, events: RequestEvents | None = None
    ) -> None:
        self.output = output
        self.index = index
        self.original = original
        self.events = events or RequestEvents()
        self.token_ids = list(original.resumed_output_ids)
        self.attempt = original
        self.state = AttemptState.WAITING
        self.num_new_tokens = 0
        self.worker_id: str | None = None  # the worker that has the attempt; None in the request queue
        # Two facts that outlive an attempt.
        self.was_accepted = False  # some worker has accepted it
        self.is_migrating = False  # its worker was lost, and no other worker has accepted it yet
        self.record = LossRecord()
        self.refusals: dict[str, ErrorInfo] = {}  # worker -> why; not asked again before the next retry
        self.submitted_s = time.monotonic()
        self.queued_s = self.submitted_s  # when it last entered the request queue
        self.wait_until_s = 0.0  # when the request queue fails the request if it still waits
        self._deadline: asyncio.TimerHandle | None = None
        self._num_attempts = 0
        self._num_chars: int | None = None  # None until the first event: a request may be submitted with output
        self._usage: Usage | None = None  # the first worker's report
        self._num_weight_updates = 0

    @property
    def is_sent(self) -> bool:
        """Return whether the worker may have the attempt."""
        return self.state in _AT_A_WORKER

    @property
    def awaits_reply(self) -> bool:
        """Return whether the worker has not replied to the submission."""
        return self.state is AttemptState.SENT

    @property
    def has_ended(self) -> bool:
        """Return whether no more output comes."""
        return self.state is AttemptState.ENDED

    def queue_order(self, policy: SchedulingPolicy) -> tuple[bool, float]:
        """Return the sort key in the queue: requests that have output first, then by virtual arrival (`contract.request`)."""
        has_output = bool(self.token_ids)
        return not has_output, virtual_arrival_s(self.submitted_s, self.original.priority, policy)

    @property
    def num_hit_tokens(self) -> int:
        """Return the number of prompt tokens that the first worker found in its prefix cache; 0 for a prompt's other choices."""
        is_first_choice = self.original.choice_index == 0
        return self._usage.num_cached_tokens if self._usage is not None and is_first_choice else 0

    def watch_deadline(self, on_late: Callable[[InFlightRequest], None], *, grace_s: float) -> None:
        """Call `on_late` `grace_s` seconds after the request's deadline, if it has one. The request may have ended by then."""
        if self._deadline is None and (time_left_s := self._time_left_s()) is not None:
            self._deadline = asyncio.get_running_loop().call_later(time_left_s + grace_s, on_late, self)

    def begin_attempt(self) -> Request:
        """Make and return the request that the next worker gets: with the output so far, and with times as of now."""
        request = self._resumed() if self._num_attempts else self.original
        self.attempt = replace(request, waited_s=self._waited_s(), time_left_s=self._time_left_s())
        self._num_attempts += 1
        self.num_new_tokens = 0
        return self.attempt

    def place(self, decision: PlacementDecision, *, policy: str, identity: str = "") -> None:
        """Assign the attempt to the worker that the routing policy chose, which has the identity `identity`. The decision also says
        which prefix the worker may fetch from another worker."""
        self._move(AttemptState.PLACED)
        self.worker_id = decision.worker_id
        self.output.placed(identity)
        if decision.source is not None or decision.is_prefill_only:
            self.attempt = replace(
                self.attempt,
                prefix_source=decision.source,
                prefill_only=decision.is_prefill_only,
                decoder=decision.decoder,
            )
        self.events.report(
            Placed(
                choice=self.index,
                worker=decision.worker_id,
                policy=policy,
                reason=decision.reason,
                predicted_hit_tokens=decision.predicted.total,
                predicted_host_tokens=decision.predicted.host or None,
                predicted_disk_tokens=decision.predicted.disk or None,
                predicted_peer_tokens=decision.predicted.peer or None,
                resumed_tokens=len(self.attempt.resumed_output_ids) or None,
                fetches_from=None if decision.source is None else decision.source.worker,
                fetched_tokens=None if decision.source is None else decision.source.num_tokens,
                prefill_only=decision.is_prefill_only or None,
            )
        )
        trace_parent = self.events.trace_parent(self.index)
        if trace_parent is not None:
            self.attempt = replace(self.attempt, trace_parent=trace_parent)

    def send(self) -> None:
        """Note that the worker may compute the attempt from now on."""
        self._move(AttemptState.SENT)
        self.events.report(Sent(choice=self.index, worker=self.worker_id, waited_s=time.monotonic() - self.queued_s))

    def accept(self) -> None:
        """Note that the worker has replied to the submission and accepted it. The first event may have come before the reply."""
        if self.state is AttemptState.SENT:
            self._accepted(AttemptState.ACCEPTED)
        self._admit()

    def weights_replaced(self, identity: str) -> None:
        """Note that the request goes on with other weights, of the identity `identity`, as an operator has chosen."""
        self.output.identity = identity
        self._num_weight_updates += bool(self.token_ids)

    def leave_worker(self) -> None:
        """Note that the request is no longer at a worker."""
        if self.worker_id is not None:
            self.output.left_worker()
        self.worker_id = None
        if self.state not in (AttemptState.WAITING, AttemptState.ENDED):
            self._move(AttemptState.WAITING)

    def take(self, event: OutputEvent) -> bool:
        """Pass the new part of an event to the output stream. If output before the event is missing, pass nothing and return False.

        An error ends the request even if output is missing: another attempt would only end in the same error later.
        """
        if event.error is not None and event.position > len(self.token_ids):
            event = event._replace(position=len(self.token_ids))
        num_repeated = len(self.token_ids) - event.position
        if num_repeated < 0:
            return False
        if self.state is not AttemptState.STREAMING:
            self._accepted(AttemptState.STREAMING)
            self._admit()
        num_chars = event.text_offset if self._num_chars is None else self._num_chars
        num_repeated_chars = num_chars - event.text_offset
        fresh = without_first(event, num_repeated, num_repeated_chars) if num_repeated or num_repeated_chars else event
        if fresh.usage is not None:
            fresh = fresh._replace(usage=self._of_all_attempts(fresh.usage))
        if fresh.token_ids and not self.num_new_tokens:
            hit_tokens = None if event.usage is None else event.usage.num_cached_tokens
            self.events.report(FirstToken(choice=self.index, worker=self.worker_id, hit_tokens=hit_tokens))
        self.num_new_tokens += len(fresh.token_ids)
        self.token_ids += fresh.token_ids
        self._num_chars = num_chars + len(fresh.text)
        has_prompt_figures = fresh.usage is not None or fresh.prompt_logprobs is not None
        if fresh.token_ids or fresh.text or fresh.finish_reason or has_prompt_figures:
            self.output.put(self.index, fresh)
        if fresh.finish_reason is not None:
            self.end()
            if fresh.error is not None:
                self._report_failure(fresh.error.kind)
            else:
                self.events.report(
                    Finished(choice=self.index, reason=fresh.finish_reason, output_tokens=len(self.token_ids))
                )
        return True

    def fail(self, error: Exception, *, failover: FailoverOutcome | None = None) -> None:
        """End the request with an error; `failover` says why it was not sent to another worker after a loss."""
        self.end()
        self._report_failure(type(error).__name__, failover)
        self.output.fail(self.index, error_event(self.original.request_id, len(self.token_ids), error), error)

    def end(self) -> None:
        """Note that no more output comes."""
        if not self.has_ended:
            self._move(AttemptState.ENDED)
        if self._deadline is not None:
            self._deadline.cancel()

    def _move(self, state: AttemptState) -> None:
        """Go to another state. No other method changes the state."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"Request {self.attempt.request_id} cannot go from {self.state.name} to {state.name}.")
        self.state = state

    def _accepted(self, state: AttemptState) -> None:
        """Go to a state in which the worker has accepted the attempt: it has replied, or an event came before the reply."""
        awaited_reply = self.awaits_reply
        self._move(state)
        if awaited_reply:
            self.events.report(Accepted(choice=self.index, worker=self.worker_id, is_migrated=self.is_migrating))
            self.is_migrating = False

    def _admit(self) -> None:
        if not self.was_accepted:
            self.was_accepted = True
            self.output.admit()

    def _report_failure(self, error: str, failover: FailoverOutcome | None = None) -> None:
        self.events.report(Failed(choice=self.index, error=error, tokens_so_far=len(self.token_ids), failover=failover))

    def _waited_s(self) -> float:
        """Return the seconds since the request was submitted to this router."""
        return time.monotonic() - self.submitted_s

    def _time_left_s(self) -> float | None:
        """Return the seconds until the request's deadline, at least 0; None if it has no deadline."""
        time_left_s = self.original.time_left_s
        return None if time_left_s is None else max(0.0, time_left_s - self._waited_s())

    def _resumed(self) -> Request:
        original, params = self.original, self.original.params
        if self.token_ids and params.prompt_logprobs is not None:  # they came with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(
            original,
            request_id=f"{original.request_id}+{self._num_attempts}",
            params=params,
            resumed_output_ids=tuple(self.token_ids),
        )

    def _of_all_attempts(self, usage: Usage) -> Usage:
        """Return the usage with the number of cached tokens that the first worker reported, and with all replacements of weights. A
        later worker's number would count the request's own prompt, which earlier attempts have put into caches."""
        if self._usage is None:
            self._usage = usage
        cached, updates = self._usage.num_cached_tokens, self._num_weight_updates
        if (usage.num_cached_tokens, usage.num_weight_updates) == (cached, updates):
            return usage
        return replace(usage, num_cached_tokens=cached, num_weight_updates=updates)


class InFlightRequests:
    """The attempts that are at one worker, by the attempt's request id."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlightRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: InFlightRequest) -> None:
        """Expect events of a request's present attempt."""
        self._requests[request.attempt.request_id] = request
        self._empty.clear()

    @property
    def request_ids(self) -> list[str]:
        """Return the request ids of all attempts."""
        return list(self._requests)

    @property
    def requests(self) -> Iterable[InFlightRequest]:
        """Return the requests of all attempts."""
        return self._requests.values()

    def get(self, request_id: str) -> InFlightRequest | None:
        """Return the request of an attempt; None if no events of the attempt are expected."""
        return self._requests.get(request_id)

    def remove(self, request_id: str) -> InFlightRequest | None:
        """Expect no more events of an attempt, and return its request; None if none were expected before."""
        request = self._requests.pop(request_id, None)
        if not self._requests:
            self._empty.set()
        return request

    def take_all(self) -> list[InFlightRequest]:
        """Expect no more events of any attempt, and return the requests."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._empty.set()
        return requests

    async def wait_until_empty(self) -> None:
        """Wait until no attempt is left."""
        await self._empty.wait()
