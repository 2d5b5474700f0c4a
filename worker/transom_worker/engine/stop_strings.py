"""Finds stop strings in text that arrives in pieces.

Example: with the stop string `abc`, the piece `xab` gives the final text `x`; `ab` is held back, since it could be the
beginning of the stop string. The next piece `d` gives `abd`, and the next piece `c` instead of it would have ended the text
after `x`.
"""

from __future__ import annotations


class StopStrings:
    """Finds the first stop string in growing text, and holds back only what could be the beginning of one."""

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Add `text`; returns the text that is now final, and the stop string that ended it, if any.

        While `may_stop` is False, all text becomes final: a stop string counts only if it begins after `min_tokens` were reached.
        """
        if not self._stops:
            return text, None
        self._held += text
        if not may_stop:
            return self.flush(), None
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: (hit[0], -len(hit[1])))  # the first, and the longest of those
            final = self._held[: at + len(stop) if self._include else at]
            self._held = ""
            return final, stop
        keep = max(self._overlap(stop) for stop in self._stops)
        final = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return final, None

    def flush(self) -> str:
        """Release the text that is held back: no more text follows, or stop strings do not count yet."""
        final, self._held = self._held, ""
        return final

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that `stop` begins with."""
        limit = min(len(stop) - 1, len(self._held))
        return next((n for n in range(limit, 0, -1) if self._held.endswith(stop[:n])), 0)
