"""Finds stop strings in text that arrives in pieces.

Example: with the stop string `abc`, the piece `xab` gives the final text `x`; `ab` is held back, since it could be the
beginning of the stop string. The next piece `d` gives `abd`, and the next piece `c` instead of it would have ended the text
after `x`.
"""

from __future__ import annotations

from transom_worker.engine.stop_automaton import StopAutomaton, StopNode


class StopStrings:
    """Finds the first stop string in growing text, and holds back only what could be the beginning of one.

    The automaton's node stands for the text that is held back.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        self._automaton = StopAutomaton(stops) if stops else None
        self._node: StopNode | None = None  # None: the root
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Add `text`; returns the text that is now final, and the stop string that ended it, if any.

        While `may_stop` is False, all text becomes final: a stop string counts only if it begins after `min_tokens` were reached.
        """
        if self._automaton is None:
            return text, None
        if not may_stop:
            return self.flush() + text, None
        found = self._search(self._automaton, text)
        held = self._held + text
        if found is not None:
            at, length = found
            self.flush()
            return held[: at + length if self._include else at], held[at : at + length]
        keep = 0 if self._node is None else self._node.length
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        """Release the text that is held back: no more text follows, or stop strings do not count yet."""
        final, self._held, self._node = self._held, "", None
        return final

    def _search(self, automaton: StopAutomaton, text: str) -> tuple[int, int] | None:
        """Move on by `text`; returns the place in the held text and `text`, and the length, of the first stop string that they
        hold, the longest of those that begin there.
        """
        node, first = self._node or automaton.root, None
        for end, character in enumerate(text, len(self._held) + 1):
            node = automaton.move(node, character)
            length = node.match_length
            if length and (first is None or end - length <= first[0]):
                first = end - length, length
        self._node = node
        return first
