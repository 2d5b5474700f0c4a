"""`ChatAnswer`: parses one choice of a chat completion, from its output events to the parts that the client gets.

With `include_reasoning: false` the client gets neither the reasoning nor the log-probabilities of reasoning tokens. With
`parallel_tool_calls: false` it gets only the first call; in most cases a grammar has already kept the model from writing more.
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
    """Reads one choice. `has_called` is true once the client has got a complete call."""

    def __init__(
        self, reader: AnswerReader, *, include_reasoning: bool = True, parallel_tool_calls: bool = True
    ) -> None:
        self.reader = reader
        self.has_called = False
        self._include_reasoning = include_reasoning
        self._max_calls = None if parallel_tool_calls else 1
        self._unshown_logprobs: deque[TokenLogprobs] = deque()  # of tokens that the reader has not read yet
        self._num_shown = 0  # number of tokens whose log-probabilities were shown or left out

    def read(self, event: OutputEvent) -> list[AnswerPart]:
        """Read the next event; return the parts that the client gets, with neighbouring parts of one kind joined."""
        parts = [part for part in self.reader.read(event) if self._is_shown(part)]
        self.has_called = self.has_called or any(isinstance(part, CallEnd) and part.is_complete for part in parts)
        return parts if len(parts) < 2 else join_parts(parts)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """Return the finish reason for the client: "tool_calls" instead of "stop" if the answer has a complete call."""
        return "tool_calls" if reason == "stop" and self.has_called else reason

    def shown_logprobs(self, event: OutputEvent) -> Iterable[TokenLogprobs]:
        """Return the log-probabilities that the client gets with an event that was read: of every output token, markup included.

        If the client gets no reasoning, a token's entry waits until the reader knows whether the token is reasoning.
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
        """Return the log-probabilities of message tokens that were read with this event, without markup and reasoning."""
        self._unshown_logprobs.extend(event.logprobs or ())
        if not self._unshown_logprobs:
            return []
        first, self._num_shown = self._num_shown, self.reader.num_read
        ready = [self._unshown_logprobs.popleft() for _ in range(self._num_shown - first)]
        return [one for position, one in enumerate(ready, first) if self.reader.is_message(position)]

    def all_shown(self, logprobs: Iterable[TokenLogprobs]) -> Iterator[TokenLogprobs]:
        """Yield the log-probabilities that the client gets of an answer that has ended; `logprobs` has those of all its tokens."""
        for position, one in enumerate(logprobs):
            if self._include_reasoning or not self.reader.is_reasoning(position):
                yield one

    def _is_shown(self, part: AnswerPart) -> bool:
        if isinstance(part, ReasoningText):
            return self._include_reasoning
        if isinstance(part, CallBegin | CallArguments | CallEnd):
            return self._max_calls is None or part.index < self._max_calls
        return not isinstance(part, MalformedMarkup)
