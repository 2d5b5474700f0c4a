"""What the parts of an answer say, for tests that compare it with the answer's text."""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    MalformedMarkup,
    MessageText,
    ReasoningText,
)


def all_text(parts: Sequence[AnswerPart]) -> str:
    """What all parts say; markup that is both counted and shown, twice."""
    texts = []
    for part in parts:
        if isinstance(part, CallBegin):
            texts.append(part.name)
        elif isinstance(part, ReasoningText | MessageText | CallArguments | MalformedMarkup):
            texts.append(part.text)
    return " ".join(texts)
