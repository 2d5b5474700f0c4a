"""`PartsWriter`: turns what a markup's parser reads into `AnswerPart`s.

Models write markup on lines of its own, so the space between a text and a marker belongs to the markup, not to the text (the
message of `Let me look.\n<tool_call>` is "Let me look."). The writer therefore holds back the space at a text's end until it knows
whether more text follows. Space at the end of the whole answer belongs to the message.
"""

from typing import Literal

from transom_core.text.markup.parts import (
    AnswerPart,
    AnswerState,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    MessageText,
    ReasoningText,
)
from transom_core.text.markup.reader import SPACE

Section = Literal["reasoning", "message"]


class PartsWriter:
    """Collects the parts of one answer; `take` may be called at any time.

    writer.begin_section("reasoning"); writer.write(text)
    writer.begin_call(name); writer.write_arguments(text); writer.end_call(is_complete=True)
    writer.end(); parts = writer.take()
    """

    def __init__(self, *, keeps_space: bool = False) -> None:
        """`keeps_space` says that the space between a text and a call is text."""
        self._keeps_space = keeps_space
        self.section: Section = "message"
        self.call_is_open = False
        self.reads_call = False  # the parser is reading the markup of calls
        self._parts: list[AnswerPart] = []
        self._text: list[str] = []  # pieces of the section's text that are not a part yet
        self._arguments: list[str] = []  # pieces of the open call's arguments that are not a part yet
        self._held: list[str] = []  # space after the text, held back
        self._drops_space = False  # space that comes now belongs to markup
        self._has_reasoning = False  # the answer has had reasoning
        self.has_text = False  # more than space has come since the last marker
        self._index = -1  # index of the last call

    @property
    def state(self) -> AnswerState:
        """Return what is being written."""
        return "tool_call" if self.reads_call else self.section

    def take(self) -> list[AnswerPart]:
        """Return the parts since the last call of this method."""
        self._close_text()
        self._close_arguments()
        parts, self._parts = self._parts, []
        return parts

    def begin_section(self, section: Section) -> None:
        """Begin a section. The space before and after this place belongs to markup. A line end is put between two reasonings."""
        self._close_text()
        self.section = section
        self._held = []
        self._drops_space = True
        self.has_text = False

    def write(self, text: str) -> None:
        """Write a piece of the section's text."""
        if self._drops_space:
            text = text.lstrip(SPACE)
            self._drops_space = not text
        body = text.rstrip(SPACE)
        if body:
            if self.section == "reasoning":
                if self._has_reasoning and not self.has_text:
                    self._text.append("\n")
                self._has_reasoning = True
            self._text += self._held
            self._text.append(body)
            self._held = []
            self.has_text = True
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def begin_call(self, name: str) -> None:
        """Begin a call, which ends the reasoning. The space before it belongs to markup, unless `keeps_space`."""
        if self._keeps_space and self.has_text:
            self._text += self._held
        self._close_text()
        self.section = "message"
        self._held = []
        self._drops_space = False
        self.has_text = False
        self._index += 1
        self.call_is_open = True
        self._parts.append(CallBegin(self._index, name))

    def write_arguments(self, text: str) -> None:
        """Write a piece of the open call's arguments."""
        self._arguments.append(text)

    def end_call(self, *, is_complete: bool) -> None:
        """End the open call."""
        self._close_arguments()
        self.call_is_open = False
        self._parts.append(CallEnd(self._index, is_complete))

    def write_malformed(self, markup: str) -> None:
        """Count malformed markup, and show it as text."""
        self._close_text()
        self._parts.append(MalformedMarkup(markup))
        self.write(markup)

    def drop_unfinished(self, markup: str) -> None:
        """Count markup that is not to be shown, such as markup in which the answer has ended."""
        self._close_text()
        if not self._keeps_space:
            self._held = []
        self._parts.append(MalformedMarkup(markup))

    def end(self) -> None:
        """End the answer. The space at its end is text, unless it follows a call."""
        if self.has_text or self._index < 0:
            self._text += self._held
        self._held = []
        self._close_text()

    def _close_text(self) -> None:
        if self._text:
            text = "".join(self._text)
            self._text = []
            self._parts.append(ReasoningText(text) if self.section == "reasoning" else MessageText(text))

    def _close_arguments(self) -> None:
        if self._arguments:
            self._parts.append(CallArguments(self._index, "".join(self._arguments)))
            self._arguments = []
