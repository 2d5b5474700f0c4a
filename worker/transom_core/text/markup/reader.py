"""`MarkupReader`: gives the characters of an answer to a parser, which waits when the next characters have not come yet.

A markup's parser is written as ordinary code from top to bottom: skip spaces, expect `{`, copy a string. Each method that may have
to wait is a generator, called with `yield from`. It yields (nothing) when it needs more of the answer, and continues when more has
come. So a parser does not depend on how the answer was cut into tokens, and reads each character once.

    name = yield from reader.until(Markers(["<tool_call>"]), write)

If a method needs characters after the answer's end, it raises `AnswerEnded`.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields when more of the answer is needed; returns a T
Write = Callable[[str], None]

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")


class AnswerEnded(Exception):
    """Raised when a parser needs more of an answer that has ended."""


class MalformedMarkupError(Exception):
    """Raised when the answer has text that its markup does not allow at this place."""


class Markers:
    """The texts (markers) of which the first one ends a free text. If two begin at the same character, the longer one counts."""

    def __init__(self, texts: Iterable[str]) -> None:
        """`texts` may be empty, but must not contain an empty text."""
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))
        self._pattern = re.compile("|".join(re.escape(text) for text in self.texts) or r"(?!)")
        self._first = re.compile(
            "[" + "".join(re.escape(text[0]) for text in self.texts) + "]" if self.texts else r"(?!)"
        )
        self._longest = max(map(len, self.texts), default=0)

    def find(self, text: str, start: int, *, ended: bool) -> tuple[int, str | None]:
        """Return where the free text in `text[start:]` ends, and the marker that follows it.

        If no complete marker follows, the marker is None and the end is where an incomplete one may begin, or the end of `text`.
        """
        match = self._pattern.search(text, start)
        if match is None:  # an incomplete marker has fewer than `_longest` characters: only the last ones are searched
            return (len(text) if ended else self._begun(text, max(start, len(text) - self._longest + 1))), None
        if not ended and match.end() == len(text) and self._goes_on(match.group()):
            return match.start(), None
        return match.start(), match.group()

    def _goes_on(self, found: str) -> bool:
        """Return whether the characters that come next may turn the marker `found` into a longer one."""
        return any(len(text) > len(found) and text.startswith(found) for text in self.texts)

    def _begun(self, text: str, start: int) -> int:
        """Return where an incomplete marker at the end of `text` may begin, at `start` or later; the end of `text` if none may."""
        for match in self._first.finditer(text, start):
            rest = text[match.start() :]
            if any(marker.startswith(rest) for marker in self.texts):
                return match.start()
        return len(text)


class MarkupReader:
    """Holds the characters of an answer that have come and were not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # characters of `_text` that were read
        self._ended = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append the answer's next characters."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def num_waiting(self) -> int:
        """Return the number of characters that have come and were not read yet."""
        return len(self._text) - self._at

    def end(self) -> None:
        """Note that the answer has ended: no more characters will come."""
        self._ended = True

    def keep(self, text: str = "") -> None:
        """Start recording what is read, until `kept` is called; the record begins with `text`."""
        self._kept = [text]

    def kept(self) -> str:
        """Stop recording, and return what was read since `keep`."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def take(self, count: int) -> str:
        """Read `count` characters, all of which must have come."""
        piece = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read what `pattern` matches at this place, among the characters that have come; it may match none."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match and match.end() > self._at else ""

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read characters as long as they match `pattern`, a class of characters with `*` or `+`; there may be none."""
        pieces: list[str] = []
        while pattern.fullmatch((yield from self.peek())):
            pieces.append(self.take_run(pattern))
        return "".join(pieces)

    def need(self, count: int) -> Reading[str]:
        """Return the next `count` characters without reading them."""
        while len(self._text) - self._at < count:
            yield from self._more()
        return self._text[self._at : self._at + count]

    def need_at_most(self, count: int) -> Reading[str]:
        """Return the next `count` characters, or those up to the answer's end, without reading them."""
        while len(self._text) - self._at < count and not self._ended:
            yield from self._more()
        return self._text[self._at : self._at + count]

    def peek(self) -> Reading[str]:
        """Return the next character without reading it."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def next_is(self, literal: str) -> Reading[bool]:
        """Return whether `literal` follows."""
        while True:
            if self._text.startswith(literal, self._at):
                return True
            if self._ended or not literal.startswith(self._text[self._at : self._at + len(literal)]):
                return False
            yield from self._more()

    def skip(self, literal: str) -> Reading[bool]:
        """Read `literal` if it follows, and return whether it did. Raises AnswerEnded if the answer ends inside the literal."""
        found = yield from self.next_is(literal)
        if found:
            self.take(len(literal))
        elif self._ended and self.num_waiting and literal.startswith(self._text[self._at :]):
            self.take(self.num_waiting)
            raise AnswerEnded
        return found

    def expect(self, literal: str) -> Reading[None]:
        """Read `literal`. Raises MalformedMarkupError if something else follows."""
        for character in literal:
            if (yield from self.peek()) != character:
                raise MalformedMarkupError
            self.take(1)

    def skip_space(self) -> Reading[None]:
        """Read spaces, tabs and line ends, up to the first other character."""
        while (yield from self.peek()) in SPACE:
            self.take_run(_SPACES)

    def until(self, markers: Markers, write: Write) -> Reading[str]:
        """Read free text up to the first of `markers`; read that marker too, and return it.

        The text goes to `write` as it comes. If the answer ends first, all text is written and `AnswerEnded` is raised.
        """
        while True:
            end, marker = markers.find(self._text, self._at, ended=self._ended)
            if end > self._at:
                write(self.take(end - self._at))
            if marker is not None:
                self.take(len(marker))
                return marker
            yield from self._more()

    def text_until(self, markers: Markers) -> Reading[tuple[str, str]]:
        """Read free text up to the first of `markers`, and that marker; return both. For text that is held until it is complete."""
        pieces: list[str] = []
        marker = yield from self.until(markers, pieces.append)
        return "".join(pieces), marker

    def _more(self) -> Reading[None]:
        if self._ended:
            raise AnswerEnded
        yield
