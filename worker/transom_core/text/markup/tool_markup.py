"""`ToolMarkup`: how one family of models writes tool calls. `CallReading`: the methods with which its parser reads and writes them.

    yield from calls.run(marker, read)      `read` is the family's parser; for each call it does:
        calls.begin(name)
        calls.arguments(piece)              once or several times
        calls.end()

Malformed markup is handled in the same way for all families:

- If it is malformed before the call's name is complete, its text from the marker on is counted as `MalformedMarkup`, and shown as
  ordinary text.
- If it is malformed after the name, the call ends incomplete (`CallEnd(is_complete=False)`), and what follows is ordinary text.
- If the answer ends inside the markup, the same happens, except that the text of an unfinished call is counted but not shown.

Text that turns out not to be a call is ordinary text, not malformed, if it has no marker (in families whose call is just JSON) or
if it is inside the reasoning.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.reader import SPACE, AnswerEnded, MalformedMarkupError, MarkupReader, Reading
from transom_core.text.markup.writer import PartsWriter


class CallReading:
    """Reads the tool calls of one answer."""

    def __init__(self, reader: MarkupReader, writer: PartsWriter, tools: Sequence[ToolSpec]) -> None:
        self.reader = reader
        self.tools = {tool.name: tool for tool in tools}
        self._writer = writer
        self._is_marked = False  # the text certainly is calls: a marker came before it, or one call was complete

    def begin(self, name: str) -> None:
        """Begin a call, whose name is complete."""
        self._writer.begin_call(name)
        self.reader.keep()

    def arguments(self, text: str) -> None:
        """Write a piece of the call's arguments, as JSON."""
        self._writer.write_arguments(text)
        self.reader.keep()

    def end(self) -> None:
        """End the call, which is complete."""
        self._writer.end_call(is_complete=True)
        self._is_marked = True
        self.reader.keep()

    def read_list(self, read: Callable[[], Reading[None]]) -> Reading[None]:
        """Read calls in brackets, separated by commas; `read` reads one. Malformed text after the list does not show the list."""
        reader = self.reader
        yield from reader.expect("[")
        while True:
            yield from reader.skip_space()
            yield from read()
            yield from reader.skip_space()
            if (yield from reader.skip("]")):
                reader.keep()
                return
            yield from reader.expect(",")

    def skip_markers(self, markers: Sequence[str]) -> Reading[None]:
        """Read the markers after the last call, which a model may forget, and the space before them."""
        for marker in markers:
            yield from self.reader.skip_space()
            yield from self.reader.skip(marker)

    def show(self, text: str) -> None:
        """Write text that was read after a call as a part of the message."""
        self._writer.write(text)
        self.reader.keep()

    def leave_out(self, text: str) -> None:
        """Drop text between calls, where no text belongs, and count it as malformed."""
        if text.strip(SPACE):
            self._writer.drop_unfinished(text)

    def run(self, marker: str, read: Callable[[CallReading], Reading[None]]) -> Reading[None]:
        """Read calls with `read`. `marker` is the marker before them, which was read already; "" if there is none."""
        self._is_marked = bool(marker)
        self.reader.keep(marker)
        self._writer.reads_call = True
        try:
            yield from read(self)
        except MalformedMarkupError:
            self._give_up(has_ended=False)
        except AnswerEnded:
            self._give_up(has_ended=True)
            raise
        finally:
            self._writer.reads_call = False
        self.reader.kept()

    def _give_up(self, *, has_ended: bool) -> None:
        """End the open call, and show or drop what was read since the last written piece. `has_ended`: the answer has ended."""
        kept = self.reader.kept()
        if self._writer.call_is_open:
            self._writer.end_call(is_complete=False)
            if not has_ended:
                self._writer.write(kept)
            elif kept.strip(SPACE):
                self._writer.drop_unfinished(kept)
        elif not self._is_marked or self._writer.section == "reasoning":  # the model thinks about the markup
            self._writer.write(kept)
        elif not has_ended:
            self._writer.write_malformed(kept)
        elif kept.strip(SPACE):
            self._writer.drop_unfinished(kept)


class ToolMarkup(ABC):
    """How a family's tool calls are read from an answer, and how a grammar allows them.

    - `openers`: the markers that begin a call, or a list of calls, anywhere in a message; a grammar allows only the first one.
    - `starters`: characters that begin calls at the start of a message, for families that write calls without a marker.
    - `markers`: the other markers, any of which may be a special token that the parser must recognise by its id.
    - `inner_tokens`: parts of markers that may be special tokens.
    - `separator`: the text between two calls; None if one opener begins all calls.
    - `keeps_space`: whether space between a message's text and a call belongs to the text.
    - `ends_reasoning`: whether an opener inside the reasoning ends the reasoning if calls follow it.
    """

    openers: tuple[str, ...] = ()
    starters: str = ""
    markers: tuple[str, ...] = ()
    inner_tokens: tuple[str, ...] = ()
    separator: str | None = None
    keeps_space: bool = False
    ends_reasoning: bool = False

    @abstractmethod
    def read(self, calls: CallReading, opener: str) -> Reading[None]:
        """Read the calls that follow `opener` ("" for a starter, which is not read yet) and the marker at their end.

        Return when ordinary text continues. Raise MalformedMarkupError if the text is not calls.
        """

    @abstractmethod
    def body(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return a grammar's expression for what follows the opener, up to the end of the call (of all calls if `separator` is
        None)."""

    def calls(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return a grammar's expression for a message that consists of calls: one, or several if `parallel`."""
        body = self.body(lark, tools, parallel=parallel)
        call = lark.rule("call", f"{lark.marker(self.openers[0])} {body}")
        if not parallel or self.separator is None:
            return call
        return f"{call} ({lark.literal(self.separator)} {call})*" if self.separator else f"{call}+"

    def calls_after_text(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return a grammar's expression for free text that may contain calls; a call follows every opener."""
        body = self.body(lark, tools, parallel=parallel)
        call = lark.rule("text_and_call", f"{lark.text_until(self.openers[0], without=self.openers[1:])} {body}")
        return f"{call}{'*' if parallel and self.separator is not None else '?'} {lark.text_without(self.openers)}"


class BareToolMarkup(ToolMarkup):
    """How a family writes calls without a marker: they begin the message with one of `starters`. A marker may come before them."""

    def calls(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for the calls, without a marker."""
        return self.body(lark, tools, parallel=parallel)

    def calls_after_text(self, lark: LarkText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """Return an expression for calls, with or without a marker, or for text that neither begins like calls nor contains a
        marker."""
        body = lark.rule("calls", self.body(lark, tools, parallel=parallel))
        text = lark.text_without(self.openers, begins=rf"[^{re.escape(self.starters)} \t\r\n]")
        opener = f"{lark.marker(self.openers[0])}? " if self.openers else ""
        return f"{opener}{body} | {text}?"
