"""Formats Transom's log lines as text or as JSON, and writes them to standard error; text lines go to the program's own log
handlers if it has some.

A line about one request has that request's id: `about_request` sets it for all later lines of a task or thread, and
`extra={"request_id": ...}` sets it for one line.
"""

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType

from transom_core.config import LogFormat

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s"

NOTHING: Mapping[str, object] = MappingProxyType({})
_process_name = ""
_request: ContextVar[tuple[str, str]] = ContextVar("transom_request", default=("", ""))  # request id, trace id


class TextLines(logging.Formatter):
    """Formats a line as text, with `[request id]` before the message if the line is about a request."""

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        request_id = _request_and_trace(record)[0]
        record.about = f"[{request_id}] " if request_id else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """Formats each line as one JSON object, for any message.

    `about` are fields that every line of this process has; `extra={"facts": {...}}` adds fields to one line.
    """

    def __init__(self, process: str, about: Mapping[str, object] = NOTHING) -> None:
        super().__init__()
        self._process, self._process_facts = process, about

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        request_id, trace_id = _request_and_trace(record)
        line = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            "pid": os.getpid(),
            **self._process_facts,
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


class _TransomHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that Transom adds; its class tells it from the program's own handlers."""


def show_logs(log_format: LogFormat = "text", process: str = "", about: Mapping[str, object] = NOTHING) -> None:
    """Show Transom's lines from the level INFO on; idempotent. Each JSON line has the process's name and the fields of `about`.

    A level that the program has set stays as it is. If the program has handlers, text lines go through them; JSON lines always go
    to standard error, and nowhere else.
    """
    global _process_name
    _process_name = process
    logger = logging.getLogger("transom")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    own = _transom_handler()
    if own is None and (log_format == "json" or not logger.hasHandlers()):
        own = _TransomHandler()
        logger.addHandler(own)
    if own is not None:
        own.setFormatter(JsonLines(process, about) if log_format == "json" else TextLines())
    if own is not None and log_format == "json":
        logger.propagate = False
        own.setStream(sys.__stderr__ or sys.stderr)  # Ray Serve replaces sys.stderr by a stream that adds to each line


def show_all_logs(log_format: LogFormat, process: str, about: Mapping[str, object] = NOTHING) -> None:
    """Show the log lines of a process that runs nothing but Transom. With JSON, these include libraries' lines, warnings and
    uncaught errors."""
    show_logs(log_format, process, about)
    own = _transom_handler()
    if log_format != "json" or own is None:
        return
    root = logging.getLogger()
    if own not in root.handlers:
        root.addHandler(own)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def process_name() -> str:
    """Return the name of this process in its log lines; empty for a program that only uses Transom as a library."""
    return _process_name


@contextlib.contextmanager
def request_log_scope() -> Iterator[None]:
    """Open a context that begins without a request, and that ends the effect of every `about_request` inside it."""
    token = _request.set(("", ""))
    try:
        yield
    finally:
        _request.reset(token)


def about_request(request_id: str, trace_id: str = "") -> None:
    """Set the request of all later lines of this task or thread, and of the tasks that it starts."""
    _request.set((request_id, trace_id))


def trace_id_of(trace_parent: str | None) -> str:
    """Return the trace id in a W3C traceparent header; empty for None."""
    return trace_parent.split("-")[1] if trace_parent else ""


def _transom_handler() -> _TransomHandler | None:
    return next((one for one in logging.getLogger("transom").handlers if isinstance(one, _TransomHandler)), None)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    found = None if error is None else (kind, error, traceback)
    logging.getLogger("transom").critical("%s was not caught.", kind.__name__, exc_info=found)


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:  # which ends the thread on purpose
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _request_and_trace(record: logging.LogRecord) -> tuple[str, str]:
    known_id, known_trace = _request.get()
    return getattr(record, "request_id", known_id), getattr(record, "trace_id", known_trace)
