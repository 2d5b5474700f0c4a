"""`MarkupParser`: feeds an answer's tokens to the code that reads the markup, and returns the parts of the answer.

With `skip_special_tokens`, a special token adds no text to the answer. In two cases the parser reads the token's own text instead:
if the token is one of the format's markers, or if it is inside a call's arguments, as when a model writes a file about chat markup.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

from transom_core.text.markup.context import MarkupTokenizer
from transom_core.text.markup.parts import AnswerPart, AnswerState
from transom_core.text.markup.reader import MarkupReader
from transom_core.text.markup.writer import PartsWriter


class MarkupParser:
    """Reads one answer, token by token; malformed markup raises no error.

    for each token:  parts += parser.push(token_id, text)
    at the end:      parts += parser.flush()

    Both calls feed `reader`, run the generator `answer`, which reads from it and writes to `writer`, and return the new parts.
    """

    def __init__(
        self,
        answer: Generator[None, None, None],
        reader: MarkupReader,
        writer: PartsWriter,
        *,
        tokenizer: MarkupTokenizer,
        markers: Iterable[str],
    ) -> None:
        """`answer` yields when it needs more characters, and returns at the answer's end. `markers` are the format's markers."""
        self._answer = answer
        self._reader = reader
        self._writer = writer
        self._tokenizer = tokenizer
        self._markers = {token_id: text for text in markers if (token_id := tokenizer.marker_id(text)) is not None}
        self._has_ended = False

    @property
    def state(self) -> AnswerState:
        """Return which part of the answer the tokens so far have reached."""
        return self._writer.state

    def push(self, token_id: int, text: str) -> list[AnswerPart]:
        """Read the next token and return the parts that it completes.

        `text` is what the token adds to the answer's text. A special token that adds no text is recognised by its id.
        """
        text = text or self._left_out(token_id)
        if not text:
            return []
        self._reader.feed(text)
        self._go_on()
        return self._writer.take()

    def flush(self) -> list[AnswerPart]:
        """End the answer, and return what was held back."""
        self._reader.end()
        self._go_on()
        return self._writer.take()

    def _go_on(self) -> None:
        """Run the answer's generator until it needs more characters."""
        if not self._has_ended:
            self._has_ended = next(self._answer, True) is True

    def _left_out(self, token_id: int) -> str:
        """Return the text that the parser reads for a token without text in the answer; "" if the token means nothing here."""
        if marker := self._markers.get(token_id):
            return marker
        tokenizer = self._tokenizer
        is_text = (
            self.state == "tool_call" and tokenizer.is_special(token_id) and token_id not in tokenizer.eos_token_ids
        )
        return tokenizer.token(token_id) if is_text else ""
