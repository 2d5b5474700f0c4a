"""The base of the response writers, which turn the engine's output events into OpenAI's JSON.

A writer belongs to one HTTP request. For a stream, `chunks` turns each event of a choice into server-sent events. For a plain
response, `add` takes all events of all choices, and `body` turns them into one JSON object. `ChunkWriter` is the base of the
writers whose streams consist of chunks of one kind (chats and completions), `EventWriter` of those whose streams consist of named
events (Responses and Messages).

A stream's constant JSON is built once per request, at its first chunk; per token only the text is serialised. For example, the text
" sky" of choice 0 costs one `json.dumps(" sky")` between two strings that were made before.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from typing import Any

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.error_responses import WireError
from transom_cluster.openai.answer.json_pieces import json_pieces
from transom_cluster.openai.answer.response_types import FinishReason
from transom_cluster.openai.answer.usage import UsageTotals
from transom_cluster.openai.request.sampling_fields import UsageChunks
from transom_core import __version__, contract
from transom_core.contract import LogprobTable, OutputEvent, Request

Event = dict[str, Any]  # a server-sent event with a name, which is its `type`
DONE = "data: [DONE]\n\n"
FINGERPRINT_DIGITS = 16  # digits of the model's identity that a fingerprint shows


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMetadata:
    """The fields that every JSON object of one response repeats."""

    id: str
    model: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str, fingerprint: str) -> dict[str, Any]:
        """Return the fields of a chunk or a whole response under OpenAI's names; `kind` is its `object` type."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": fingerprint,
        }


def system_fingerprint(identity: str) -> str:
    """Return a text that changes when an answer's numbers may change: the version of Transom, and the first digits of the model's
    identity if the identity is known."""
    return "-".join(filter(None, ("transom", __version__, identity[:FINGERPRINT_DIGITS])))


def data_line(payload: Mapping[str, object]) -> str:
    """Return one server-sent event. It is ASCII, since some clients split lines at Unicode's line separators."""
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n"


class ResponseWriter(ABC):
    """Writes one response. `readers` has one reader per choice, or is empty if the answers need no parsing."""

    prompt_only = False  # True: the client wants no output, and does not get the one token that the engine computes

    def __init__(
        self, metadata: ResponseMetadata, requests: Sequence[Request], *, readers: Sequence[AnswerReader] = ()
    ) -> None:
        self.metadata = metadata
        self.readers = readers
        self.usage = UsageTotals(requests, readers)
        self.identity = ""  # the identity of the model that computes the answer; set before the first chunk or the body

    @property
    def fingerprint(self) -> str:
        """Return the response's `system_fingerprint`."""
        return system_fingerprint(self.identity)

    def shown_event(self, event: OutputEvent) -> OutputEvent:
        """Return the part of an event that the client gets."""
        if not self.prompt_only:
            return event
        reason: contract.FinishReason | None = event.finish_reason and "length"
        return event._replace(token_ids=(), text="", logprobs=None, finish_reason=reason)

    @abstractmethod
    def chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield the server-sent events for one event of choice `index`, in pieces; there may be none."""

    @abstractmethod
    def add(self, index: int, event: OutputEvent) -> None:
        """Keep one event of choice `index` for `body`."""

    @abstractmethod
    def body(self) -> Mapping[str, Any]:
        """Return the whole response, with long lists as `LazyList`s. Every choice must have ended without an error."""

    @abstractmethod
    def stream_end(self) -> Iterator[str]:
        """Yield the server-sent events that close a stream in which every choice has ended, in pieces."""

    def stream_error(self, error: WireError) -> Iterator[str]:
        """Yield the server-sent events that close a stream which has begun and fails, in pieces."""
        yield data_line(error.body)


class EventWriter(ResponseWriter):
    """Writes a response with one choice. Its stream consists of events with names."""

    @abstractmethod
    def _read(self, event: OutputEvent) -> Iterator[Event]:
        """Yield the stream's events for one output event; the last output event also ends the answer."""

    def add(self, index: int, event: OutputEvent) -> None:
        """Keep one event for `body`."""
        for _ in self._read(event):
            pass

    def _written(self, event: Mapping[str, Any]) -> Iterator[str]:
        """Yield a server-sent event in pieces; its name is its type."""
        yield f"event: {event['type']}\ndata: "
        yield from json_pieces(event, is_ascii=True)
        yield "\n\n"


class ChoiceOutput:
    """Collects the output of one choice of a plain response in compact form: one text buffer and arrays of log-probabilities."""

    def __init__(self) -> None:
        self._text = StringIO()
        self.logprobs = LogprobTable(1)
        self.finish_reason: contract.FinishReason | None = None

    @property
    def text(self) -> str:
        """Return all text so far."""
        return self._text.getvalue()

    def add(self, event: OutputEvent) -> None:
        """Add the next event."""
        self._text.write(event.text)
        self.logprobs.extend(event.logprobs or ())
        self.finish_reason = event.finish_reason or self.finish_reason


class ChunkWriter(ResponseWriter):
    """Writes a response whose stream consists of chunks. Unless `include_usage` is "none", every chunk has a field `usage`; with
    "last" it is null in all chunks but the last.

    The constant JSON around a choice and around its text is made once (here without `usage`):

        data: {"id":...,"choices":[{"index":   0,   "delta":{"content":   " sky"   },"logprobs":null,"finish_reason":null   }]}
        _opening                               0,   text_field[0]         TEXT     text_field[1] ...                        _closing

    `_text_openings[0]` is all that comes before the text of choice 0, and `_text_closing` all that comes after a text.
    """

    kind: str
    """The `object` type of whole responses."""
    chunk_kind: str
    """The `object` type of the stream's chunks."""
    text_field: tuple[str, str]
    """The JSON before and after the text in a choice of a chunk."""

    def __init__(
        self,
        metadata: ResponseMetadata,
        requests: Sequence[Request],
        *,
        include_usage: UsageChunks,
        readers: Sequence[AnswerReader] = (),
    ) -> None:
        super().__init__(metadata, requests, readers=readers)
        self._outputs = [ChoiceOutput() for _ in requests]
        self._has_started = [False] * len(requests)
        self._include_usage = include_usage
        self._close_with("" if include_usage == "none" else ',"usage":null')

    def _close_with(self, usage: str) -> None:
        self._closing = f"}}]{usage}}}\n\n"
        self._text_closing = f'{self.text_field[1]},"logprobs":null,"finish_reason":null{self._closing}'

    def _take_usage(self) -> None:
        """Write the usage so far into the next chunks, if every chunk has it."""
        if self._include_usage == "every":
            self._close_with(f',"usage":{json.dumps(self.usage.body)}')

    @cached_property
    def _opening(self) -> str:
        opening = json.dumps(self._chunk_fields(), separators=(",", ":"))[:-1]
        return f'data: {opening},"choices":[{{"index":'

    @cached_property
    def _text_openings(self) -> list[str]:
        return [f"{self._opening}{i},{self.text_field[0]}" for i in range(len(self._outputs))]

    def _chunk_fields(self) -> dict[str, Any]:
        return self.metadata.fields(self.chunk_kind, self.fingerprint)

    @abstractmethod
    def _choice(self, index: int, output: ChoiceOutput) -> Mapping[str, Any]:
        """Return one choice of a whole response."""

    def add(self, index: int, event: OutputEvent) -> None:
        """Keep one event of choice `index` for `body`."""
        self._outputs[index].add(event)

    def body(self) -> dict[str, Any]:
        """Return a whole response."""
        choices = [self._choice(index, output) for index, output in enumerate(self._outputs)]
        return {**self.metadata.fields(self.kind, self.fingerprint), "choices": choices, "usage": self.usage.body}

    def stream_end(self) -> Iterator[str]:
        """Yield a chunk with the usage if the client has asked for it, then the end mark."""
        if self._include_usage != "none":
            yield data_line({**self._chunk_fields(), "choices": [], "usage": self.usage.body})
        yield DONE


def final_finish_reason(reason: contract.FinishReason | None) -> FinishReason:
    """Return the finish reason of a choice that has ended without an error.

    Raises:
        ValueError: the choice has not ended, or has ended with an error.
    """
    if reason == "stop" or reason == "length":
        return reason
    raise ValueError(f"The choice ended with {reason!r}.")
