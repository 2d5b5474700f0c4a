"""Formats tracebacks of unexpected errors for the log, without the errors' messages, which may quote a client's prompt."""

from collections.abc import Iterator
from traceback import TracebackException


def traceback_lines(error: BaseException, *, with_messages: bool) -> Iterator[str]:
    """Yield the traceback of an error, after the tracebacks of the errors that caused it.

    With `with_messages` false, only the type of each error is shown.
    """
    if with_messages:
        yield from TracebackException.from_exception(error).format()
        return
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from traceback_lines(cause, with_messages=False)
        yield "Then:\n"
    yield from TracebackException.from_exception(error).stack.format()
    yield f"{type(error).__qualname__} (its message may quote a prompt; --log-prompts shows it)\n"


def stack_of(error: BaseException) -> str:
    """Return an error's traceback as one text, without messages."""
    return "".join(traceback_lines(error, with_messages=False))
