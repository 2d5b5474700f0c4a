"""`CallReading`: what a family's parser of tool calls reads from and writes to, and how markup that is wrong is given back.

The rule for markup that is not what it should be, for all families:

- before a call's name is complete, the markup's text, from its marker on, is `MalformedMarkup`, and goes on as ordinary text;
- after it, the call ends incomplete (`CallEnd(is_complete=False)`), and what follows is ordinary text;
- where the answer ends inside the markup, the same, but an unfinished call is not shown as text.

What has no marker (families whose call is just JSON), or stands inside the reasoning, and turns out to be no call is ordinary text
and not malformed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transom_core.text.markup.context import ToolSpec
from transom_core.text.markup.reader import SPACE, AnswerEnded, MalformedMarkupError, MarkupReader, Reading
from transom_core.text.markup.writer import PartsWriter


class CallReading:
    """Reads the tool calls of one answer."""

    def __init__(self, reader: MarkupReader, writer: PartsWriter, tools: Sequence[ToolSpec]) -> None:
        self.reader = reader
        self.tools = {tool.name: tool for tool in tools}
        self._writer = writer
        self._is_marked = False  # that these are calls is certain, by a marker or by a call that is complete

    def begin(self, name: str) -> None:
        """A call's name is complete."""
        self._writer.begin_call(name)
        self.reader.keep()

    def arguments(self, text: str) -> None:
        """Write a piece of the call's arguments, as JSON."""
        self._writer.write_arguments(text)
        self.reader.keep()

    def end(self) -> None:
        """The call is complete."""
        self._writer.end_call(is_complete=True)
        self._is_marked = True
        self.reader.keep()

    def close(self) -> None:
        """The markup around the calls is complete, too."""
        self.reader.keep()

    def leave_out(self, text: str) -> None:
        """Count a text that stands between calls, where no text belongs; it is not shown."""
        if text.strip(SPACE):
            self._writer.drop_unfinished(text)

    def run(self, marker: str, read: Callable[[CallReading], Reading[None]]) -> Reading[None]:
        """Read calls with `read`, after `marker`, which was read already; "" where nothing marks them as calls."""
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
