"""Counts what clients sent and received, for comparison with the server's metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from soaking.answers import Answer


@dataclass(slots=True)
class Tally:
    """What clients know. Requests whose client left early count apart: the server may have counted any part of them."""

    ended: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    num_left: Counter[str] = field(default_factory=Counter)  # by path
    num_choices: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, path: str, answer: Answer) -> None:
        """Count an answer that came to its end."""
        self.ended[path, answer.status] += 1
        if answer.is_good:
            self.num_choices += len(answer.choices)
            self.prompt_tokens += answer.usage["prompt_tokens"]
            self.output_tokens += answer.usage["completion_tokens"]

    def left(self, path: str) -> None:
        """Count a request whose client left, or may have left, before its end."""
        self.num_left[path] += 1
