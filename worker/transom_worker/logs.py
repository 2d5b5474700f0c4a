"""Transom's log lines, for people or as JSON, on standard error unless the program has its own way of logging.

A line that is about one request names it: by `about_request` for all lines below a call, or by `extra={"request_id": ...}` for one.
"""

from __future__ import annotations

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

from transom_worker.config import LogFormat

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s"

NOTHING: Mapping[str, object] = MappingProxyType({})
_process_name = ""
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
    """One JSON object a line, whatever is in the message.

    `about` are fields that all lines of this process have; `extra={"facts": {...}}` adds fields of a line's own.
    """

    def __init__(self, process: str, about: Mapping[str, object] = NOTHING) -> None:
        super().__init__()
        self._process, self._process_facts = process, about

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


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, and not the program's."""


def show_logs(log_format: LogFormat = "text", process: str = "", about: Mapping[str, object] = NOTHING) -> None:
    """Show Transom's lines from INFO on; idempotent. In JSON each has the process's name, and the fields of `about`.

    Levels that somebody has set stay as they are, and so do handlers, through which lines for people then go. Lines in JSON go
    to standard error in any case, and nowhere else.
    """
    global _process_name
    _process_name = process
    logger = logging.getLogger("transom")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    own = _own_handler()
    if own is None and (log_format == "json" or not logger.hasHandlers()):
        own = _OwnHandler()
        logger.addHandler(own)
    if own is not None:
        own.setFormatter(JsonLines(process, about) if log_format == "json" else TextLines())
    if own is not None and log_format == "json":
        logger.propagate = False
        own.setStream(sys.__stderr__ or sys.stderr)  # Ray Serve's own stands in for the other, and adds to each line


def show_all_logs(log_format: LogFormat, process: str, about: Mapping[str, object] = NOTHING) -> None:
    """The same for a process that is ours alone: in JSON are also what libraries log and warn of, and what nobody has caught."""
    show_logs(log_format, process, about)
    own = _own_handler()
    if log_format != "json" or own is None:
        return
    root = logging.getLogger()
    if own not in root.handlers:
        root.addHandler(own)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def process_name() -> str:
    """What this process calls itself in its lines; empty for a program that is not ours."""
    return _process_name


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


def _own_handler() -> _OwnHandler | None:
    return next((one for one in logging.getLogger("transom").handlers if isinstance(one, _OwnHandler)), None)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    found = None if error is None else (kind, error, traceback)
    logging.getLogger("transom").critical("%s was not caught.", kind.__name__, exc_info=found)


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:  # which ends the thread on purpose
        _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _about(record: logging.LogRecord) -> tuple[str, str]:
    known_id, known_trace = _request.get()
    return getattr(record, "request_id", known_id), getattr(record, "trace_id", known_trace)
