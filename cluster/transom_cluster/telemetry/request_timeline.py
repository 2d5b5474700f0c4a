"""What happens to each HTTP request at this router, step by step: for `/debug/requests/{id}`, spans and log lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from transom_cluster.routing.placer import PlacementDecision
from transom_cluster.telemetry.tracing import RequestTrace
from transom_worker.contract import Request, Usage
from transom_worker.telemetry.request_timelines import Timeline, TimelineStore, response_id_of

ONLY_CLIENT = "all"
"""The client of every request where the server wants no API keys."""


class Choice(Protocol):
    """What a life looks at while its request runs: the output of one choice so far."""

    token_ids: list[int]


class RequestTimeline(Timeline):
    """One answer's steps, those of all its choices. `client` is who may read it; keys are not kept."""

    __slots__ = (
        "_choices",
        "client",
        "endpoint",
        "error",
        "finish_reasons",
        "first_token_s",
        "has_left",
        "num_choices",
        "num_hit_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_prompts",
        "num_resumes",
        "outer_id",
        "stream",
        "trace",
        "workers",
    )

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        endpoint: str = "",
        client: str = ONLY_CLIENT,
        stream: bool = False,
        outer_id: str = "",
        trace: RequestTrace | None = None,
    ) -> None:
        first = requests[0]
        super().__init__(response_id_of(first.request_id), first.arrival_s or time.time())
        self.endpoint = endpoint
        self.client = client
        self.stream = stream
        self.outer_id = outer_id  # the x-request-id that it came with
        self.trace = trace
        self.num_choices = len(requests)
        self.num_prompts = sum(one.choice_index == 0 for one in requests)
        self.num_prompt_tokens = sum(one.num_prompt_tokens for one in requests if one.choice_index == 0)
        self.num_output_tokens = 0  # of all choices, once they have ended
        self.num_hit_tokens = 0
        self.num_resumes = 0
        self.first_token_s = 0.0
        self.workers: dict[str, None] = {}  # in order
        self.finish_reasons: dict[int, str] = {}
        self.error = ""
        self.has_left = False
        self._choices: Sequence[Choice] = ()

    @property
    def state(self) -> str:
        """For people and for lists."""
        if not self.end_s:
            return "running"
        return "client left" if self.has_left else "failed" if self.error else "finished"

    @property
    def num_tokens_now(self) -> int:
        """Tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self._choices) if self._choices else self.num_output_tokens

    # What happens, in this order

    def arrived(self, choices: Sequence[Choice]) -> None:
        """The body is read, and the prompt is tokens."""
        self._choices = choices
        facts = {"endpoint": self.endpoint, "prompt_tokens": self.num_prompt_tokens, "stream": self.stream}
        self.add("arrived", self.arrival_s, **facts, choices=self.num_choices)
        self.add("tokenised")

    def waits(self, index: int, reason: str) -> None:
        """No worker can take it now."""
        self.add("waits", reason=reason, **self._about(index))

    def placed(self, index: int, placed: PlacementDecision, *, policy: str, num_resumed: int) -> str | None:
        """A worker was chosen; returns the traceparent of what is done there."""
        self.workers[placed.worker_id] = None
        facts: dict[str, Any] = {"worker": placed.worker_id, "policy": policy, "reason": placed.reason}
        facts["predicted_hit_tokens"] = placed.predicted_tokens
        if num_resumed:
            facts["resumed_tokens"] = num_resumed
        self.add("placed", **facts, **self._about(index))
        if self.trace is None:
            return None
        return self.trace.attempt_began(index, placed, policy=policy, num_resumed=num_resumed)

    def sent(self, index: int, worker: str | None) -> None:
        """It is on its way to the worker."""
        self.add("sent", worker=worker, **self._about(index))

    def accepted(self, index: int, worker: str | None) -> None:
        """The worker has queued it."""
        self.add("accepted", worker=worker, **self._about(index))

    def turned_away(self, index: int, worker: str, kind: str) -> None:
        """That worker does not take it; another may."""
        self.add("turned_away", worker=worker, error=kind, **self._about(index))
        self._end_attempt(index, kind)

    def began(self, index: int, worker: str | None, usage: Usage | None) -> None:
        """The first token of an attempt has come."""
        now_s = time.time()
        self.first_token_s = self.first_token_s or now_s
        hit = {} if usage is None else {"hit_tokens": usage.num_cached_tokens}
        self.add("first_token", now_s, worker=worker, **hit, **self._about(index))

    def lost(self, index: int, worker: str, cause: str, num_tokens: int) -> None:
        """It cannot go on at its worker."""
        self.num_resumes += 1
        self.add("lost", worker=worker, cause=cause, tokens_so_far=num_tokens, **self._about(index))
        self._end_attempt(index, cause)

    def finished(self, index: int, reason: str, num_tokens: int) -> None:
        """A choice is complete."""
        self.finish_reasons[index] = reason
        self.add("finished", reason=reason, output_tokens=num_tokens, **self._about(index))
        self._end_attempt(index)

    def failed(self, index: int, kind: str, num_tokens: int) -> None:
        """A choice ends with an error, or was refused; its class alone is told, since its message may quote a prompt."""
        self.error = self.error or kind
        self.finish_reasons[index] = "error"
        self.add("failed", error=kind, tokens_so_far=num_tokens, **self._about(index))
        self._end_attempt(index, kind)

    def hit(self, usage: Usage) -> None:
        """What of a prompt was cached is known."""
        self.num_hit_tokens += usage.num_cached_tokens

    def client_left(self) -> None:
        """Nobody waits for it any more."""
        self.has_left = True
        self.add("client_left", tokens_so_far=self.num_tokens_now)

    def ended(self) -> None:
        """Nothing more is done for it."""
        self.num_output_tokens, self._choices = self.num_tokens_now, ()
        self.add("ended")
        if self.trace is not None:
            self.trace.request_ended()

    def line(self) -> dict[str, Any]:
        """It in a line, as JSON values."""
        now_s = time.time()
        return {
            "id": self.request_id,
            "x_request_id": self.outer_id or None,
            "state": self.state,
            "endpoint": self.endpoint,
            "arrival_s": self.arrival_s,
            "age_s": now_s - self.arrival_s,
            "seconds": (self.end_s or now_s) - self.arrival_s,
            "first_token_after_s": self.first_token_s - self.arrival_s if self.first_token_s else None,
            "workers": list(self.workers),
            "resumes": self.num_resumes,
            "prompts": self.num_prompts,
            "choices": self.num_choices,
            "prompt_tokens": self.num_prompt_tokens,
            "hit_tokens": self.num_hit_tokens,
            "output_tokens": self.num_tokens_now,
            "finish_reasons": sorted(set(self.finish_reasons.values())),
            "error": self.error or None,
        }

    def _about(self, index: int) -> dict[str, int]:
        return {"choice": index} if self.num_choices > 1 else {}

    def _end_attempt(self, index: int, error: str = "") -> None:
        if self.trace is not None:
            self.trace.attempt_ended(index, error)


class RequestTimelines:
    """The last requests of one router. Runs on its event loop."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._timelines = TimelineStore()

    @contextlib.contextmanager
    def following(self, timeline: RequestTimeline, choices: Sequence[Choice]) -> Iterator[None]:
        """A request is served inside."""
        timeline.arrived(choices)
        self._timelines.begin(timeline)
        try:
            yield
        finally:
            timeline.ended()
            self._timelines.end(timeline)

    def find(self, request_id: str, client: str) -> dict[str, Any] | None:
        """This router's part of the timeline of one of a client's requests, by either of its ids, as JSON values; None if it is not
        known (any more)."""
        answer_id = response_id_of(request_id)
        for timeline in self._timelines.newest():
            assert isinstance(timeline, RequestTimeline)
            if timeline.client == client and (timeline.request_id == answer_id or timeline.outer_id == request_id):
                by = {"router": self._router_id}
                steps = [{"at_s": step.at_s, **by, "what": step.kind, **step.facts} for step in timeline.events]
                return {"line": timeline.line(), "steps": steps}
        return None

    def lines(self, client: str, state: str | None, limit: int) -> list[dict[str, Any]]:
        """A client's last requests in a line each, the newest first; `state`: running, or finished (however it ended)."""
        found: list[dict[str, Any]] = []
        for timeline in self._timelines.newest():
            assert isinstance(timeline, RequestTimeline)
            is_wanted = state is None or (state == "running") == (not timeline.end_s)
            if timeline.client == client and is_wanted:
                found.append({**timeline.line(), "router": self._router_id})
        return sorted(found, key=lambda line: line["arrival_s"], reverse=True)[:limit]
