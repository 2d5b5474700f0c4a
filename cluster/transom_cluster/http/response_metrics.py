"""Counts one response's tokens and measures its latencies for the router's metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_core.contract import OutputEvent, Request


class ResponseMetrics:
    """Measures each choice's time to first token and inter-token latency, and counts tokens as `usage` does."""

    def __init__(self, metrics: RouterMetrics, requests: Sequence[Request]) -> None:
        self._metrics = metrics
        self._requests = requests
        self._start_s = time.perf_counter()
        self._last_token_s = [0.0] * len(requests)

    def requests_submitted(self) -> None:
        """The router has accepted all engine requests. A prompt counts once, however many choices it has."""
        prompts = (request.num_prompt_tokens for request in self._requests if request.choice_index == 0)
        self._metrics.prompt_tokens.inc(sum(prompts))

    def event_received(self, index: int, event: OutputEvent) -> None:
        """An output event of choice `index` has arrived and is about to be sent."""
        if not event.token_ids:
            return
        now_s = time.perf_counter()
        if self._last_token_s[index]:
            self._metrics.inter_token_s.observe(now_s - self._last_token_s[index])
        else:
            self._metrics.first_token(now_s - self._start_s, self._requests[index].request_id)
        self._last_token_s[index] = now_s

    def event_sent(self, event: OutputEvent) -> None:
        """The client gets this event; `echo` with `max_tokens` 0 has removed its token."""
        if event.token_ids:
            self._metrics.output_tokens.inc(len(event.token_ids))
