"""What is made of a request when it has ended: spans and a log line, on a thread of its own, so that no step waits for them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from transom_worker.config import EngineConfig
from transom_worker.logs import trace_id_of
from transom_worker.telemetry.engine_timelines import EngineLife
from transom_worker.telemetry.tracing import Tracing, is_sampled, nanoseconds

logger = logging.getLogger("transom.worker.request")

MAX_WAITING = 4096  # beyond it lives are dropped: nothing may wait for a log or a collector
CLOSE_S = 2.0

Tell = Callable[[EngineLife, str], None]


class EndedRequests:
    """Hands each life that is over to those who make something of it, in order. `close_all` is called at the end."""

    def __init__(self, tells: Sequence[Tell], close_all: Callable[[], None] = lambda: None) -> None:
        self._tells = tells
        self._close_all = close_all
        self._queue: queue.Queue[tuple[EngineLife, str] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="transom-ended", daemon=True)
        self._thread.start()

    def __call__(self, life: EngineLife, reason: str) -> None:
        """A life is over; returns at once."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((life, reason))

    def close(self) -> None:
        """Tell what is left, for a moment at most. Idempotent."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
            self._thread.join(CLOSE_S)
        self._close_all()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            for tell in self._tells:
                try:
                    tell(*item)
                except Exception:  # a bug, and no reason to tell nothing of the next
                    logger.exception("A request's end could not be told.")


class RequestSpans:
    """The spans queue, prefill and decode below the router's, from a life's own times."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker

    def __call__(self, life: EngineLife, reason: str) -> None:
        """Make a request's spans."""
        if life.trace_parent is not None and not is_sampled(life.trace_parent):
            return
        tracing = self._tracing
        parent = tracing.context_of({"traceparent": life.trace_parent or ""})
        about = {"transom.worker": self._worker, "transom.request_id": life.request_id}
        root = None
        if life.trace_parent is None:  # nobody asked over HTTP
            root = tracing.start("request", parent, at_s=life.queued_s, attributes=about)
            parent = tracing.context_below(root)
        parts: tuple[tuple[str, float, float, dict[str, Any]], ...] = (
            ("queue", life.queued_s, life.admitted_s, {}),
            ("prefill", life.admitted_s, life.first_token_s, prefix_attributes(life)),
            ("decode", life.first_token_s, life.end_s, {}),
        )
        for name, begin_s, end_s, attributes in parts:
            if not begin_s:
                break
            span = tracing.start(name, parent, at_s=begin_s, attributes=about | attributes)
            if not end_s or name == "decode":  # the last one
                span.set_attribute("transom.preemptions", life.num_preemptions)
                span.set_attribute("transom.finish_reason", reason)
                span.set_attribute("gen_ai.usage.output_tokens", life.num_output_tokens)
                if reason == "error":
                    tracing.fail(span, "error")
            span.end(nanoseconds(end_s or life.end_s))
        if root is not None:
            root.end(nanoseconds(life.end_s))


def prefix_attributes(life: EngineLife) -> dict[str, Any]:
    """Prompt tokens by outcome of the hit search, as attributes."""
    return {"transom.tokens.hit": 0, "transom.tokens.repaired": 0} | {
        f"transom.tokens.{outcome}": count for outcome, count in life.tokens.items()
    }


def log_request(life: EngineLife, reason: str) -> None:
    """One line for each request that has ended at a worker."""
    seconds = {
        "queue_s": (life.admitted_s or life.end_s) - life.queued_s,
        "prefill_s": (life.first_token_s or life.end_s) - life.admitted_s if life.admitted_s else 0.0,
        "decode_s": life.end_s - life.first_token_s if life.first_token_s else 0.0,
    }
    facts: dict[str, Any] = {
        "finish_reason": reason,
        **{name: round(value, 6) for name, value in seconds.items()},
        "prompt_tokens": life.num_prompt_tokens,
        "output_tokens": life.num_output_tokens,
        "hit_tokens": life.tokens.get("hit", 0),
        "repaired_tokens": life.tokens.get("repaired", 0),
        "preemptions": life.num_preemptions,
    }
    extra = {"request_id": life.request_id, "trace_id": trace_id_of(life.trace_parent), "facts": facts}
    logger.info("request ended at the worker: %s", reason, extra=extra)


def follow_requests(config: EngineConfig, worker: str, tracing: Tracing | None) -> list[EndedRequests]:
    """Whoever has to hear of ended requests by these settings."""
    tells: list[Tell] = []
    if config.log_format == "json":
        tells.append(log_request)
    if tracing is not None:
        tells.append(RequestSpans(tracing, worker))
    if tracing is not None:
        return [EndedRequests(tells, close_all=tracing.close)]
    return [EndedRequests(tells)] if tells else []
