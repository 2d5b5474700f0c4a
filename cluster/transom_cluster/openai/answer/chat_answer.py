"""`ChatAnswer`: one choice of a chat completion that is parsed, from its output events to the parts that the client gets.

The client gets neither reasoning with `include_reasoning: false`, nor the log-probabilities of its tokens. With
`parallel_tool_calls: false` it gets the first call alone: mostly a grammar has kept the model from writing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.response_types import FinishReason
from transom_core.contract import OutputEvent, TokenLogprobs
from transom_core.text.markup.parts import (
    AnswerPart,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    ReasoningText,
    join_parts,
)


class ChatAnswer:
    """Reads one choice; `has_called` is whether the client has got a complete call."""

    def __init__(
        self, reader: AnswerReader, *, include_reasoning: bool = True, parallel_tool_calls: bool = True
    ) -> None:
        self.reader = reader
        self.has_called = False
        self._include_reasoning = include_reasoning
        self._max_calls = None if parallel_tool_calls else 1
        self._unshown_logprobs: deque[TokenLogprobs] = deque()  # of tokens that the reader has not read
        self._num_shown = 0  # tokens whose log-probabilities were shown, or left out

    def read(self, event: OutputEvent) -> list[AnswerPart]:
        """Read the next event; returns what the client gets of it, with neighbours of one kind joined."""
        parts = [part for part in self.reader.read(event) if self._is_shown(part)]
        self.has_called = self.has_called or any(isinstance(part, CallEnd) and part.is_complete for part in parts)
        return parts if len(parts) < 2 else join_parts(parts)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """What the client is told: an answer with a complete call that did not end at its length ended to have its tools called."""
        return "tool_calls" if reason == "stop" and self.has_called else reason

    def shown_logprobs(self, event: OutputEvent) -> Iterable[TokenLogprobs]:
        """The log-probabilities that the client gets with an event that was read: every output token's, markup included.

        Without reasoning, a token's have to wait until it is known what the token is.
        """
        if self._include_reasoning:
            return event.logprobs or ()
        self._unshown_logprobs.extend(event.logprobs or ())
        has_ended = event.finish_reason is not None
        count = len(self._unshown_logprobs) if has_ended else self.reader.num_read - self._num_shown
        ready = [self._unshown_logprobs.popleft() for _ in range(count)]
        first, self._num_shown = self._num_shown, self._num_shown + count
        return [logprobs for position, logprobs in enumerate(ready, first) if not self.reader.is_reasoning(position)]

    def message_logprobs(self, event: OutputEvent) -> list[TokenLogprobs]:
        """The log-probabilities of the message's tokens that were read with this event; markup and reasoning have none."""
        self._unshown_logprobs.extend(event.logprobs or ())
        if not self._unshown_logprobs:
            return []
        first, self._num_shown = self._num_shown, self.reader.num_read
        ready = [self._unshown_logprobs.popleft() for _ in range(self._num_shown - first)]
        return [one for position, one in enumerate(ready, first) if self.reader.is_message(position)]

    def all_shown(self, logprobs: Iterable[TokenLogprobs]) -> Iterator[TokenLogprobs]:
        """The log-probabilities that the client gets, of all tokens of an answer that has ended."""
        for position, one in enumerate(logprobs):
            if self._include_reasoning or not self.reader.is_reasoning(position):
                yield one

    def _is_shown(self, part: AnswerPart) -> bool:
        if isinstance(part, ReasoningText):
            return self._include_reasoning
        if isinstance(part, CallBegin | CallArguments | CallEnd):
            return self._max_calls is None or part.index < self._max_calls
        return not isinstance(part, MalformedMarkup)
