"""Unexpected errors as log lines that quote nobody's prompt."""

from __future__ import annotations

from collections.abc import Iterator
from traceback import TracebackException


def traceback_lines(error: BaseException, *, with_messages: bool) -> Iterator[str]:
    """The traceback of an error and of those behind it, the first one first; without messages only their types are named."""
    if with_messages:
        yield from TracebackException.from_exception(error).format()
        return
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from traceback_lines(cause, with_messages=False)
        yield "Then:\n"
    yield from TracebackException.from_exception(error).stack.format()
    yield f"{type(error).__qualname__} (its message may quote a prompt; --log-prompts shows it)\n"
