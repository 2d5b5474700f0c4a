"""`ChoiceOutput`: what one choice of a plain response has put out so far, in as little memory as its text and arrays take."""

from __future__ import annotations

from io import StringIO

from transom_core.contract import FinishReason, LogprobTable, OutputEvent


class ChoiceOutput:
    """The text and the log-probabilities of a choice, from all its events."""

    def __init__(self) -> None:
        self._text = StringIO()
        self.logprobs = LogprobTable(1)
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return self._text.getvalue()

    def add(self, event: OutputEvent) -> None:
        """Add the next event."""
        self._text.write(event.text)
        self.logprobs.extend(event.logprobs or ())
        self.finish_reason = event.finish_reason or self.finish_reason
