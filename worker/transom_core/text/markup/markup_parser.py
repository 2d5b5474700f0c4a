"""`MarkupParser`: feeds an answer's tokens to the code that reads the markup, and returns the parts of the answer.

With `skip_special_tokens`, a special token adds no text to the answer. In two cases the parser reads the token's own text instead:
if the token is one of the format's markers, or if it is inside a call's arguments, as when a model writes a file about chat markup.

A model may also write the text of a marker in ordinary tokens. A `TokenMarkerParser` therefore reads each marker token as one
character that no text contains (half of a surrogate pair), so that only the token counts as a marker. If the vocabulary does not
have the marker as a special token, the text is the marker.
"""

import re
from collections.abc import Generator, Iterable
from dataclasses import replace

from transom_core.text.markup.context import MarkupTokenizer
from transom_core.text.markup.parts import AnswerPart, AnswerState, CallBegin, CallEnd
from transom_core.text.markup.reader import MarkupReader
from transom_core.text.markup.writer import PartsWriter

_FIRST = 0xD800  # lone surrogates: decoded text never has them


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


class TokenMarkers:
    """The markers of one family in one vocabulary."""

    def __init__(self, tokenizer: MarkupTokenizer, texts: Iterable[str]) -> None:
        self.by_id: dict[int, str] = {}  # token id -> the character that a parser reads for it
        self._texts: dict[str, str] = {}  # that character -> the marker's text
        self._read_as: dict[str, str] = {}  # the marker's text -> what a parser reads for it
        for text in texts:
            token_id = tokenizer.marker_id(text)
            character = text if token_id is None else chr(_FIRST + len(self._texts))
            self._read_as[text] = character
            if token_id is not None:
                self.by_id[token_id] = character
                self._texts[character] = text
        self._characters = re.compile("[" + "".join(self._texts) + "]") if self._texts else re.compile(r"(?!)")
        self._markers = re.compile("|".join(map(re.escape, self._read_as)))

    def __getitem__(self, text: str) -> str:
        """Return what a parser reads for the marker of this text."""
        return self._read_as[text]

    def read_as(self, text: str) -> str:
        """Return `text` with its markers as a parser reads them; call it only for text that is known to be markup."""
        return self._markers.sub(lambda match: self._read_as[match.group()], text)

    def spelled(self, text: str) -> str:
        """Return `text` with the markers' own texts, for markup that is shown."""
        return self._characters.sub(lambda match: self._texts[match.group()], text)


class TokenMarkerParser(MarkupParser):
    """A parser that feeds its reader one character for each marker token, and puts the markers' texts into the parts it returns."""

    def __init__(
        self,
        answer: Generator[None, None, None],
        reader: MarkupReader,
        writer: PartsWriter,
        *,
        tokenizer: MarkupTokenizer,
        markers: TokenMarkers,
    ) -> None:
        super().__init__(answer, reader, writer, tokenizer=tokenizer, markers=())
        self._token_markers = markers

    def push(self, token_id: int, text: str) -> list[AnswerPart]:
        """Read the next token and return the parts that it completes."""
        return self._spelled(super().push(token_id, self._token_markers.by_id.get(token_id, text)))

    def flush(self) -> list[AnswerPart]:
        """End the answer, and return what was held back."""
        return self._spelled(super().flush())

    def _spelled(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        spelled = self._token_markers.spelled
        return [
            part if isinstance(part, CallBegin | CallEnd) else replace(part, text=spelled(part.text)) for part in parts
        ]
