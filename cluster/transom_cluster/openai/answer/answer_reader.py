"""`AnswerReader`: reads one choice, from its output events to the parts of the answer that the client gets.

It gives every token, with the token's part of the text, to an answer parser (`transom_core.text.markup`), which is a state machine
over tokens: some tokens are markers (`<tool_call>`), the others have text. An output event has token ids and text, but does not say
which text belongs to which token. The text of a token may even come with a later event, because a worker holds back the bytes of an
unfinished character, and text that could be the beginning of a stop string. A found stop string is cut from the text after the
router has received its tokens.

The reader detokenises the same ids as the worker, so it knows how many characters each token has. Text that an event brings is
final: no stop string cuts it later. The reader gives a token to the parser once all characters of the token are final. Example,
with events of one token each, and the stop string `END`:

    token          final text   tokens read
    `It`           `It`         `It`
    ` E`           ` `          -            `E` is held back: it could be the beginning of `END`
    `ast`          `East`       ` E`, `ast`
    ` END`         ` `          ` `          `END` is cut; the parser gets the space before it as plain text

Text that the worker has cut never reaches the parser. If only a part of a token was cut, the parser gets the rest of it as plain
text, even if the whole token is a marker.

With `include_reasoning: false` the client gets neither the reasoning nor the log-probabilities of reasoning tokens. With
`parallel_tool_calls: false` it gets only the first call; in most cases a grammar has already kept the model from writing more.

The reader's state depends only on the output, and the router keeps it, so a migration to another worker does not affect it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from transom_cluster.openai.answer.response_types import FinishReason
from transom_core.contract import OutputEvent, SamplingParams, TokenLogprobs
from transom_core.text.detokenizer import Detokenizer
from transom_core.text.markup.markup_parser import MarkupParser
from transom_core.text.markup.parts import (
    AnswerPart,
    AnswerState,
    CallArguments,
    CallBegin,
    CallEnd,
    MalformedMarkup,
    ReasoningText,
    join_parts,
)
from transom_core.text.tokenizer import Tokenizer

NO_TOKEN_ID = -1
"""The id under which the parser gets text that is not a whole token: an unfinished character, or the rest of a token that a stop
string has cut."""


@dataclass(slots=True)
class AnswerTally:
    """Counts the tool calls of an answer by outcome."""

    num_calls: int = 0  # calls that have begun, so their names are known
    num_parsed: int = 0  # calls that were read to their end
    num_malformed: int = 0  # pieces of markup that break the rules of the model's call format
    num_incomplete: int = 0  # calls that were unfinished when the answer ended
    has_degraded: bool = False  # whether the parser made text of malformed markup

    def add(self, parts: Iterable[AnswerPart], *, has_ended: bool) -> None:
        """Count the calls in `parts`. `has_ended` is true for the parts that the parser held back until the answer ended."""
        for part in parts:
            if isinstance(part, CallBegin):
                self.num_calls += 1
            elif isinstance(part, CallEnd) and part.is_complete:
                self.num_parsed += 1
            elif isinstance(part, CallEnd | MalformedMarkup) and has_ended:
                self.num_incomplete += 1
            elif isinstance(part, CallEnd | MalformedMarkup):
                self.num_malformed += 1
                self.has_degraded |= isinstance(part, MalformedMarkup)


class AnswerReader:
    """Reads one choice. A response writer calls `read` for each event and, if the client wants log-probabilities, after each `read`
    either `shown_logprobs` or `message_logprobs`, or after the last one `all_shown`.

    `reasoning_spans` and `message_spans` are the output positions of reasoning tokens and of message tokens, as ranges in ascending
    order; the markers around them belong to neither.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        parser: MarkupParser,
        *,
        include_reasoning: bool = True,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._parser = parser
        self._unread_tokens: deque[tuple[int, str]] = deque()  # ids, and their text before any cut
        self._unread_text = ""  # final text of a token whose remaining characters are not final yet
        self._include_reasoning = include_reasoning
        self._max_calls = None if parallel_tool_calls else 1
        self._unshown_logprobs: deque[TokenLogprobs] = deque()  # of tokens that the parser has not seen yet
        self._num_shown = 0  # number of tokens whose log-probabilities were shown or left out
        self.has_called = False  # whether the client has got a complete call
        self.num_read = 0  # tokens that the parser has seen: in the end, all except those that a stop string has cut
        self.tally = AnswerTally()
        self.num_reasoning_tokens = 0
        self.reasoning_spans: list[range] = []
        self.message_spans: list[range] = []

    @property
    def state(self) -> AnswerState:
        """Return the kind of content that the parser is in now, such as reasoning or the message."""
        return self._parser.state

    def is_reasoning(self, position: int) -> bool:
        """Return whether the output token at `position` is reasoning. A token that a stop string has cut counts as reasoning if the
        answer ended inside its reasoning."""
        if position >= self.num_read:
            return self.state == "reasoning"
        return _is_in(self.reasoning_spans, position)

    def is_message(self, position: int) -> bool:
        """Return whether the output token at `position` was read and belongs to the message."""
        return _is_in(self.message_spans, position)

    def read(self, event: OutputEvent) -> list[AnswerPart]:
        """Read the choice's next event, which must not be an error; return the parts that the client gets, with neighbouring parts
        of one kind joined."""
        parts = [part for part in self._known_parts(event) if self._is_shown(part)]
        self.has_called = self.has_called or any(isinstance(part, CallEnd) and part.is_complete for part in parts)
        return parts if len(parts) < 2 else join_parts(parts)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """Return the finish reason for the client: "tool_calls" instead of "stop" if the answer has a complete call."""
        return "tool_calls" if reason == "stop" and self.has_called else reason

    def shown_logprobs(self, event: OutputEvent) -> Iterable[TokenLogprobs]:
        """Return the log-probabilities that the client gets with an event that was read. They include those of markup tokens.

        If the client gets no reasoning, an entry waits until its token is read, and is left out if the token is reasoning. With
        the last event, tokens that a stop string has cut count as read.
        """
        if self._include_reasoning:
            return event.logprobs or ()
        self._unshown_logprobs.extend(event.logprobs or ())
        has_ended = event.finish_reason is not None
        count = len(self._unshown_logprobs) if has_ended else self.num_read - self._num_shown
        ready = [self._unshown_logprobs.popleft() for _ in range(count)]
        first, self._num_shown = self._num_shown, self._num_shown + count
        return [logprobs for position, logprobs in enumerate(ready, first) if not self.is_reasoning(position)]

    def message_logprobs(self, event: OutputEvent) -> list[TokenLogprobs]:
        """Return the log-probabilities of message tokens that were read with this event, without markup and reasoning."""
        self._unshown_logprobs.extend(event.logprobs or ())
        if not self._unshown_logprobs:
            return []
        first, self._num_shown = self._num_shown, self.num_read
        ready = [self._unshown_logprobs.popleft() for _ in range(self._num_shown - first)]
        return [one for position, one in enumerate(ready, first) if self.is_message(position)]

    def all_shown(self, logprobs: Iterable[TokenLogprobs]) -> Iterator[TokenLogprobs]:
        """Yield the log-probabilities that the client gets of an answer that has ended; `logprobs` has those of all its tokens."""
        for position, one in enumerate(logprobs):
            if self._include_reasoning or not self.is_reasoning(position):
                yield one

    def _is_shown(self, part: AnswerPart) -> bool:
        if isinstance(part, ReasoningText):
            return self._include_reasoning
        if isinstance(part, CallBegin | CallArguments | CallEnd):
            return self._max_calls is None or part.index < self._max_calls
        return not isinstance(part, MalformedMarkup)

    def _known_parts(self, event: OutputEvent) -> list[AnswerPart]:
        """Return the parts of the answer that become known with the next event, including those that the client does not get."""
        unread, push = self._unread_tokens, self._detokenizer.push
        for token_id in event.token_ids:
            unread.append((token_id, push(token_id)))
        has_ended = event.finish_reason is not None
        text, begin = self._unread_text + event.text, 0
        parts: list[AnswerPart] = []
        num_left = 1 if has_ended else 0  # `_read_end` reads the answer's last token
        while len(unread) > num_left:
            token_id, token_text = unread[0]
            end = begin + len(token_text)
            if end > len(text):
                break
            unread.popleft()
            parts += self._read_token(token_id, text[begin:end])
            begin = end
        self._unread_text = text[begin:]
        if has_ended:
            # A stop string has cut the text if the text ends before the last token begins, or if `stop_reason` is a string.
            parts += self._read_end(is_cut=len(unread) > 1 or isinstance(event.stop_reason, str))
        self.tally.add(parts, has_ended=False)
        if has_ended:
            held_back = self._parser.flush()
            self.tally.add(held_back, has_ended=True)
            parts += held_back
        return parts

    def _read_end(self, *, is_cut: bool) -> Iterator[AnswerPart]:
        """Read the rest of the final text, and the last token with it unless a stop string has cut that token.

        The rest is one of these: the last token's text; "" for a stop token, which is not part of the text; either of these with
        U+FFFD after it, if the output ends in an unfinished character; or the part of a token that a stop string has left.
        """
        rest, self._unread_text = self._unread_text, ""
        if self._unread_tokens:
            token_id, token_text = self._unread_tokens[-1]
            is_whole = len(self._unread_tokens) == 1 and bool(token_text) and rest.startswith(token_text)
            if is_whole:
                yield from self._read_token(token_id, token_text)
                rest = rest[len(token_text) :]
            if rest:
                yield from self._parser.push(NO_TOKEN_ID, rest)
            if not is_whole and not is_cut:  # a stop token, or one that ends inside a character: it has no text here
                yield from self._read_token(token_id, "")
            self._unread_tokens.clear()

    def _read_token(self, token_id: int, text: str) -> Iterator[AnswerPart]:
        """Give one token to the parser. If its text begins with U+FFFD for an unfinished character of earlier tokens, the parser
        gets that character first, by itself, because it recognises a marker only if the token's text is exactly the marker."""
        if text.startswith("\ufffd") and len(text) > 1:
            own = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            if len(own) < len(text) and text.endswith(own):
                yield from self._parser.push(NO_TOKEN_ID, text[: len(text) - len(own)])
                text = own
        state = self._parser.state  # a marker changes it, and so counts as neither reasoning nor message
        yield from self._parser.push(token_id, text)
        if state == self._parser.state == "reasoning":
            self.num_reasoning_tokens += 1
            self._add_to(self.reasoning_spans)
        # A special token that is skipped, such as the end of the turn, has no text and is not a part of the message.
        elif state == self._parser.state == "message" and (text or not self._tokenizer.is_special(token_id)):
            self._add_to(self.message_spans)
        self.num_read += 1

    def _add_to(self, spans: list[range]) -> None:
        """Add the output position `num_read` to the spans."""
        at = self.num_read
        if spans and spans[-1].stop == at:
            spans[-1] = range(spans[-1].start, at + 1)
        else:
            spans.append(range(at, at + 1))


def _is_in(spans: Sequence[range], position: int) -> bool:
    """Return whether one of the spans, which are in ascending order, contains the position."""
    at = bisect_right(spans, position, key=lambda span: span.start)
    return at > 0 and position in spans[at - 1]
