"""Records timelines of a router's requests, for `/debug/requests`, span attributes and log lines.

- **timeline**: all events of one HTTP request at this router, in order, and its figures. It holds neither prompts nor generated
  text.
- **summary**: the figures of one timeline, for one line of `/debug/requests`.
- **client**: the owner of a request, as a digest of its API key. A client sees only its own requests.
"""

import heapq
from collections.abc import Sequence
from typing import Any

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.telemetry.request_events import (
    Arrived,
    ChoiceEvent,
    ChoiceOutput,
    ClientLeft,
    Ended,
    Failed,
    Finished,
    FirstToken,
    Lost,
    Placed,
    RequestEvent,
)
from transom_core.clock import steady_time_s
from transom_core.contract import Request
from transom_core.telemetry.request_timelines import Timeline, TimelineStore, response_id_of

ONLY_CLIENT = "all"
"""The client of every request where the server requires no API keys."""


class RequestTimeline(Timeline):
    """The sink that records the events of one HTTP request and keeps its figures. `store` has it after its event `Arrived`.

    `outer_id` is the `x-request-id` header of the request, which arrived `age_s` seconds ago. `answers` are the readers of its
    choices, if answers are parsed.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        store: TimelineStore,
        *,
        endpoint: str = "",
        client: str = ONLY_CLIENT,
        stream: bool = False,
        outer_id: str = "",
        age_s: float = 0.0,
        answers: Sequence[AnswerReader] = (),
    ) -> None:
        super().__init__(response_id_of(requests[0].request_id), steady_time_s() - age_s, client=client)
        self.endpoint = endpoint
        self.stream = stream
        self.outer_id = outer_id
        policy = requests[0].kv_policy  # all choices have the same policy and grammar
        self.kv_policy = None if policy is None else policy.text
        self.has_grammar = requests[0].grammar is not None
        self.num_choices = len(requests)
        self.num_prompts = sum(one.choice_index == 0 for one in requests)
        self.num_prompt_tokens = sum(one.num_prompt_tokens for one in requests if one.choice_index == 0)
        self.num_output_tokens = 0  # of all choices; final once the request has ended
        self.num_hit_tokens = 0  # of all prompts; final once the request has ended
        self.num_resumes = 0  # the number of attempts that were lost
        self.first_token_s = 0.0  # when the first token of any choice came; 0 before
        self.workers: dict[str, None] = {}  # in the order in which they were chosen
        self.finish_reasons: dict[int, str] = {}  # by choice
        self.error = ""  # the class of the first error
        self.has_left = False  # the client has disconnected
        self.answer_states: list[str] = []  # "reasoning", "message" or "tool_call", by choice, if answers are parsed
        self.num_tool_calls = 0  # calls that have begun, of all choices
        self.num_reasoning_tokens = 0  # of all choices
        self._choices: Sequence[ChoiceOutput] = ()  # only while the request runs: their output must not stay in memory
        self._answers = answers  # only while the request runs
        self._store = store

    @property
    def state(self) -> str:
        """Return the request's state in a summary: running, finished, failed or client left."""
        if not self.end_s:
            return "running"
        return "client left" if self.has_left else "failed" if self.error else "finished"

    def receive(self, event: RequestEvent) -> None:
        """Record an event, and update the figures."""
        now_s = steady_time_s()
        match event:
            case Arrived(choices=choices):
                self._choices = choices
                facts = {"endpoint": self.endpoint, "prompt_tokens": self.num_prompt_tokens, "stream": self.stream}
                self.add("arrived", self.arrival_s, **facts, choices=self.num_choices)
                self.add("tokenised", now_s)
                self._store.begin(self)
            case ClientLeft():
                self.has_left = True
                self._count_tokens()
                self.add("client_left", now_s, tokens_so_far=self.num_output_tokens)
            case Ended():
                self._count_tokens()
                self._choices = self._answers = ()
                self.add("ended", now_s)
                self._store.end(self)
            case ChoiceEvent():
                self._update(event, now_s)
                choice = {"choice": event.choice} if self.num_choices > 1 else {}
                self.add(event.kind, now_s, **event.facts(), **choice)

    def _update(self, event: ChoiceEvent, now_s: float) -> None:
        match event:
            case Placed(worker=worker):
                self.workers[worker] = None
            case FirstToken():
                self.first_token_s = self.first_token_s or now_s
            case Lost():
                self.num_resumes += 1
            case Finished(reason=reason):
                self.finish_reasons[event.choice] = reason
            case Failed(error=error):
                self.error = self.error or error
                self.finish_reasons[event.choice] = "error"

    def _count_tokens(self) -> None:
        """Read the token counts from the choices while they run."""
        if self._choices:
            self.num_output_tokens = sum(len(choice.token_ids) for choice in self._choices)
            self.num_hit_tokens = sum(choice.num_hit_tokens for choice in self._choices)
        if self._answers:
            self.answer_states = [answer.state for answer in self._answers]
            self.num_tool_calls = sum(answer.tally.num_calls for answer in self._answers)
            self.num_reasoning_tokens = sum(answer.num_reasoning_tokens for answer in self._answers)

    def summary(self) -> dict[str, Any]:
        """Return the request's present figures as JSON values."""
        self._count_tokens()
        now_s = steady_time_s()
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
            "kv_policy": self.kv_policy,
            "grammar": self.has_grammar,
            "answers": self.answer_states,
            "tool_calls": self.num_tool_calls,
            "prompt_tokens": self.num_prompt_tokens,
            "hit_tokens": self.num_hit_tokens,
            "output_tokens": self.num_output_tokens,
            "reasoning_tokens": self.num_reasoning_tokens,
            "finish_reasons": sorted(set(self.finish_reasons.values())),
            "error": self.error or None,
        }


class RequestTimelines:
    """The timelines of one router's last requests. Runs on the router's event loop."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self.store = TimelineStore()

    def find(self, request_id: str, client: str) -> dict[str, Any] | None:
        """Return this router's part of the timeline of a client's request, as JSON values; None if the router does not have it.

        `request_id` is the response's id or the request's `x-request-id` header.
        """
        response_id = response_id_of(request_id)
        for timeline in self._of_client(client):
            if timeline.request_id == response_id or timeline.outer_id == request_id:
                by = {"router": self._router_id}
                steps = [{"at_s": event.at_s, **by, "what": event.kind, **event.facts} for event in timeline.events]
                return {"line": timeline.summary(), "steps": steps}
        return None

    def summaries(self, client: str, state: str | None, limit: int) -> list[dict[str, Any]]:
        """Return summaries of a client's last requests, newest first.

        `state` selects requests that run (`running`) or that have ended in any way (`finished`); None selects both.
        """
        found = [one for one in self._of_client(client) if state is None or (state == "running") == (not one.end_s)]
        newest = heapq.nlargest(limit, found, key=lambda timeline: timeline.arrival_s)
        return [{**timeline.summary(), "router": self._router_id} for timeline in newest]

    def _of_client(self, client: str) -> list[RequestTimeline]:
        timelines = (timeline for timeline in self.store.newest() if isinstance(timeline, RequestTimeline))
        return [timeline for timeline in timelines if timeline.client == client]
