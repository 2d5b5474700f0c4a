"""`MarkupParser`: feeds an answer's tokens to the code that reads its markup, and collects the parts.

A special token may add no text to the answer, since `skip_special_tokens` leaves it out. Where it is one of the format's markers,
or stands inside a call's arguments (a model that writes a file about chat markup writes such tokens into them), its own text
is read instead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

from transom_core.text.markup.context import MarkupTokenizer
from transom_core.text.markup.parts import AnswerPart, AnswerState
from transom_core.text.markup.reader import MarkupReader
from transom_core.text.markup.writer import PartsWriter


class MarkupParser:
    """Reads one answer, token by token, and never raises: a generator reads from `reader` and writes to `writer`."""

    __slots__ = ("_answer", "_has_ended", "_markers", "_reader", "_tokenizer", "_writer")

    def __init__(
        self,
        answer: Generator[None, None, None],
        reader: MarkupReader,
        writer: PartsWriter,
        *,
        tokenizer: MarkupTokenizer,
        markers: Iterable[str],
    ) -> None:
        """`answer` yields where it needs more characters, and returns at the answer's end. `markers`: all that the format has."""
        self._answer = answer
        self._reader = reader
        self._writer = writer
        self._tokenizer = tokenizer
        self._markers = {token_id: text for text in markers if (token_id := tokenizer.marker_id(text)) is not None}
        self._has_ended = False

    @property
    def state(self) -> AnswerState:
        """What the answer is in after the tokens so far."""
        return self._writer.state

    def push(self, token_id: int, text: str) -> list[AnswerPart]:
        """Read the next token and return the parts that it completes.

        `text` is what the token adds to the answer's text. A special token that adds none is known by its id.
        """
        text = text or self._left_out(token_id)
        if not text:
            return []
        self._reader.feed(text)
        self._go_on()
        return self._writer.take()

    def flush(self) -> list[AnswerPart]:
        """Return what was held back, as the answer has ended."""
        self._reader.end()
        self._go_on()
        return self._writer.take()

    def _go_on(self) -> None:
        """Run the answer's code up to where it needs more characters."""
        if not self._has_ended:
            self._has_ended = next(self._answer, True) is True

    def _left_out(self, token_id: int) -> str:
        """The text of a special token that added none to the answer; "" where it means nothing here."""
        if marker := self._markers.get(token_id):
            return marker
        tokenizer = self._tokenizer
        is_text = (
            self.state == "tool_call" and tokenizer.is_special(token_id) and token_id not in tokenizer.eos_token_ids
        )
        return tokenizer.token(token_id) if is_text else ""
