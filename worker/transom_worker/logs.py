"""Transom's log lines, for people or as JSON, on standard error unless the program has its own way of logging.

A line that is about one request names it: by `about_request` for all lines below a call, or by `extra={"request_id": ...}` for one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime

from transom_worker.config import LogFormat

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s"

_request: ContextVar[tuple[str, str]] = ContextVar("transom_request", default=("", ""))  # its id, and its trace's


class TextLines(logging.Formatter):
    """A line for people: with `[request id]` where it is about one."""

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        request_id = _about(record)[0]
        record.about = f"[{request_id}] " if request_id else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line, whatever is in the message. `extra={"facts": {...}}` adds fields of a line's own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        request_id, trace_id = _about(record)
        line = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            "pid": os.getpid(),
        }
        if request_id:
            line["request_id"] = request_id
        if trace_id:
            line["trace_id"] = trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        line.update(getattr(record, "facts", {}))
        return json.dumps(line, default=str)


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, and not the program's."""


def show_logs(log_format: LogFormat = "text", process: str = "") -> None:
    """Show Transom's lines from INFO on; idempotent.

    Levels that somebody has set stay as they are, and so do handlers, through which lines for people then go. Lines in JSON go
    to standard error in any case, and nowhere else.
    """
    logger = logging.getLogger("transom")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    own = next((handler for handler in logger.handlers if isinstance(handler, _OwnHandler)), None)
    if own is None and (log_format == "json" or not logger.hasHandlers()):
        own = _OwnHandler()
        logger.addHandler(own)
    if own is not None:
        own.setFormatter(JsonLines(process) if log_format == "json" else TextLines())
    if own is not None and log_format == "json":
        logger.propagate = False
        own.setStream(sys.__stderr__ or sys.stderr)  # Ray Serve's own stands in for the other, and adds to each line


@contextlib.contextmanager
def following_requests() -> Iterator[None]:
    """What `about_request` names inside is forgotten afterwards."""
    token = _request.set(("", ""))
    try:
        yield
    finally:
        _request.reset(token)


def about_request(request_id: str, trace_id: str = "") -> None:
    """Lines from here on are about this request, in this task or thread and in tasks that it starts."""
    _request.set((request_id, trace_id))


def trace_id_of(trace_parent: str | None) -> str:
    """The trace's id in W3C's traceparent header; empty without one."""
    return trace_parent.split("-")[1] if trace_parent else ""


def _about(record: logging.LogRecord) -> tuple[str, str]:
    known_id, known_trace = _request.get()
    return getattr(record, "request_id", known_id), getattr(record, "trace_id", known_trace)
