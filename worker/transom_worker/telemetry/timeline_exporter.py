"""Exports the timelines of ended requests as OpenTelemetry spans and as JSON log lines, on a thread of its own.

The engine's thread only puts a timeline into a bounded queue, so no step waits for a log or a trace collector. If the queue is
full, the timeline is dropped.

- **timeline**: what happened to one request at this worker, with its times and its token counts (`engine_timelines`).
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from transom_core.config import EngineConfig
from transom_core.logs import trace_id_of
from transom_core.telemetry.tracing import Tracing, is_sampled, nanoseconds
from transom_worker.telemetry.engine_timelines import EngineTimeline

logger = logging.getLogger("transom.worker.request")

MAX_QUEUED = 4096
CLOSE_S = 2.0

ExportFormat = Callable[[EngineTimeline, str], None]
"""Exports a timeline in one format; takes it and its finish reason (stop, length, abort, error, handover to a decode worker)."""


class TimelineExporter:
    """Exports each timeline in each of `formats`, in the order of the requests' ends. `close` calls `close_formats` last."""

    def __init__(self, formats: Sequence[ExportFormat], close_formats: Callable[[], None] = lambda: None) -> None:
        self._formats = formats
        self._close_formats = close_formats
        self._queue: queue.Queue[tuple[EngineTimeline, str] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="transom-ended", daemon=True)
        self._thread.start()

    def export(self, timeline: EngineTimeline, finish_reason: str) -> None:
        """Queue the timeline of a request that has ended, without waiting."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((timeline, finish_reason))

    def close(self) -> None:
        """Export the queued timelines, for at most `CLOSE_S` seconds, and end the thread. Idempotent."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
            self._thread.join(CLOSE_S)
        self._close_formats()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            for export in self._formats:
                try:
                    export(*item)
                except Exception:  # a bug must not keep the next requests from being exported
                    logger.exception("Exporting a request's timeline failed.")


class RequestSpans:
    """Makes the spans `queue`, `prefill` and `decode` of a request from its timeline's times, as children of the router's span.

    If a request came without a router, such as in offline inference, they are children of a span `request` that this class makes.
    """

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker

    def __call__(self, timeline: EngineTimeline, finish_reason: str) -> None:
        """Export one request's spans, unless its trace is not sampled."""
        if timeline.trace_parent is not None and not is_sampled(timeline.trace_parent):
            return
        tracing = self._tracing
        parent = tracing.context_of({"traceparent": timeline.trace_parent or ""})
        about = {"transom.worker": self._worker, "transom.request_id": timeline.request_id}
        root = None
        if timeline.trace_parent is None:
            root = tracing.start("request", parent, at_s=timeline.queued_s, attributes=about)
            parent = tracing.context_below(root)
        parts: tuple[tuple[str, float, float, dict[str, Any]], ...] = (
            ("queue", timeline.queued_s, timeline.admitted_s, {}),
            ("prefill", timeline.admitted_s, timeline.first_token_s, prefix_attributes(timeline)),
            ("decode", timeline.first_token_s, timeline.end_s, {}),
        )
        for name, begin_s, end_s, attributes in parts:
            if not begin_s:  # the request ended before this part began
                break
            span = tracing.start(name, parent, at_s=begin_s, attributes=about | attributes)
            is_last = not end_s or name == "decode"  # the request ended in this part
            if is_last:
                span.set_attribute("transom.preemptions", timeline.num_preemptions)
                span.set_attribute("transom.finish_reason", finish_reason)
                span.set_attribute("gen_ai.usage.output_tokens", timeline.num_output_tokens)
                if finish_reason == "error":
                    tracing.fail(span, "error")
            span.end(nanoseconds(end_s or timeline.end_s))
        if root is not None:
            root.end(nanoseconds(timeline.end_s))


def prefix_attributes(timeline: EngineTimeline) -> dict[str, Any]:
    """Return span attributes with the number of prompt tokens by prompt outcome, such as `hit`: found in the prefix cache."""
    return {"transom.tokens.hit": 0, "transom.tokens.repaired": 0} | {
        f"transom.tokens.{outcome}": count for outcome, count in timeline.tokens.items()
    }


def log_request(timeline: EngineTimeline, finish_reason: str) -> None:
    """Write one log line about a request that has ended at this worker."""
    admitted_s, first_token_s, end_s = timeline.admitted_s, timeline.first_token_s, timeline.end_s
    seconds = {
        "queue_s": (admitted_s or end_s) - timeline.queued_s,
        "prefill_s": (first_token_s or end_s) - admitted_s if admitted_s else 0.0,
        "decode_s": end_s - first_token_s if first_token_s else 0.0,
    }
    facts: dict[str, Any] = {
        "finish_reason": finish_reason,
        **{name: round(value, 6) for name, value in seconds.items()},
        "prompt_tokens": timeline.num_prompt_tokens,
        "output_tokens": timeline.num_output_tokens,
        "hit_tokens": timeline.tokens.get("hit", 0),
        "repaired_tokens": timeline.tokens.get("repaired", 0),
        "preemptions": timeline.num_preemptions,
    }
    extra = {"request_id": timeline.request_id, "trace_id": trace_id_of(timeline.trace_parent), "facts": facts}
    logger.info("request ended at the worker: %s", finish_reason, extra=extra)


def timeline_exporter(config: EngineConfig, worker: str, tracing: Tracing | None) -> TimelineExporter | None:
    """Return the exporter for the formats that the settings ask for; None if they ask for none."""
    formats: list[ExportFormat] = []
    if config.log_format == "json":
        formats.append(log_request)
    if tracing is not None:
        return TimelineExporter([*formats, RequestSpans(tracing, worker)], close_formats=tracing.close)
    return TimelineExporter(formats) if formats else None
