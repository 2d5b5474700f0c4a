"""`AwaySources`: the sources that do not answer on one of two ways, by calls or by reads of their memory.

A source is *away* on a way after an error there, or after a wait for half of a fetch's time that was given up. Of the requests that
want its prefixes, one in each `AWAY_S` tries whether it answers again. The others do without this way: if calls go unanswered, they
compute; if only reads fail, the source's blocks come by calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

AWAY_S = 30.0
FORGOTTEN_S = 3600.0  # a source that no request has named for this time, since its worker is gone


class AwaySources:
    """The sources that are away on one way. `timeout_s` is the longest time of a fetch."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.until_s: dict[str, float] = {}  # source -> when it is tried again

    @contextlib.contextmanager
    def noted(self, source: str) -> Iterator[None]:
        """Note whether the source answers what the context waits for."""
        begin_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or time.monotonic() - begin_s >= self._timeout_s / 2:
                self.until_s[source] = time.monotonic() + AWAY_S
            raise
        self.until_s.pop(source, None)

    def is_asked(self, source: str) -> bool:
        """Return whether a request should ask a source. While the source is away, that is one request each `AWAY_S`."""
        until_s, now_s = self.until_s.get(source), time.monotonic()
        if until_s is None:
            return True
        if now_s >= until_s:
            self.until_s = {one: at for one, at in self.until_s.items() if now_s < at + FORGOTTEN_S}
            self.until_s[source] = now_s + AWAY_S
        return now_s >= until_s
