"""`TokenMarkers`: distinguishes markers that are special tokens from the same text in ordinary tokens.

A model may write the text of a marker in ordinary tokens, for example in a file about chat markup. The parsers that use this module
read each marker token as one character that no text contains (half of a surrogate pair), so that only the token counts as a marker.
If the vocabulary does not have the marker as a special token, the text is the marker.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from dataclasses import replace

from transom_core.text.markup.context import MarkupTokenizer
from transom_core.text.markup.markup_parser import MarkupParser
from transom_core.text.markup.parts import AnswerPart, CallBegin, CallEnd
from transom_core.text.markup.reader import MarkupReader
from transom_core.text.markup.writer import PartsWriter

_FIRST = 0xD800  # lone surrogates: decoded text never has them


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
