"""`ToolMarkup`: how one family of models writes tool calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from transom_core.text.markup.call_reading import CallReading
from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.lark import LarkText
from transom_core.text.markup.reader import Reading


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
        None).
        """

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
        marker.
        """
        body = lark.rule("calls", self.body(lark, tools, parallel=parallel))
        text = lark.text_without(self.openers, begins=rf"[^{re.escape(self.starters)} \t\r\n]")
        opener = f"{lark.marker(self.openers[0])}? " if self.openers else ""
        return f"{opener}{body} | {text}?"
