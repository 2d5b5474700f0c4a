"""`MessagesWriter`: writes the answer of /v1/messages, as one message or as a stream of events.

A stream has these events; each block of the content has its own start, deltas and stop:

    message_start  ping  (content_block_start  content_block_delta ...  content_block_stop) ...  message_delta  message_stop

A part of the answer that does not belong to the open block closes it and opens the next one.
"""

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

import msgspec

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.chat_message import call_id
from transom_cluster.openai.answer.error_responses import WireError
from transom_cluster.openai.answer.opaque_reasoning import write_reasoning
from transom_cluster.openai.answer.writers import Event, EventWriter, ResponseMetadata
from transom_cluster.openai.messages.object_types import MessageObject, MessagesUsage, StopReason, messages_error
from transom_core.contract import OutputEvent, Request
from transom_core.text.markup.parts import AnswerPart, CallArguments, CallBegin, CallEnd, MessageText, ReasoningText

_SHOWN = write_reasoning("")  # the signature of thinking that the client can read
_INPUT: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class MessagesWriter(EventWriter):
    """Writes one message, from one choice that `answer` parses. The first `num_cacheable_tokens` tokens of the prompt fill whole
    blocks of the prefix cache. With `omits_thinking` thinking has no text."""

    def __init__(
        self,
        metadata: ResponseMetadata,
        requests: Sequence[Request],
        answer: AnswerReader,
        *,
        num_cacheable_tokens: int,
        omits_thinking: bool = False,
    ) -> None:
        super().__init__(metadata, requests, readers=[answer])
        self._answer = answer
        self._num_cacheable = num_cacheable_tokens
        self._omits_thinking = omits_thinking
        self._content: list[Any] = []  # the blocks that have ended
        self._open: dict[str, Any] = {}  # empty if no block is open
        self._text = StringIO()  # of the open block: its text, its thinking, or the JSON of its input
        self._has_begun = False
        self._stop: tuple[StopReason | None, str | None] = (None, None)  # the reason, and the stop sequence

    def chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield the server-sent events for one output event of the engine."""
        if not self._has_begun:
            self._has_begun = True
            yield from self._written({"type": "message_start", "message": self.body()})
            yield from self._written({"type": "ping"})
        for told in self._read(event):
            yield from self._written(told)

    def body(self) -> MessageObject:
        """Return a `message` object."""
        stop_reason, stop_sequence = self._stop
        return {
            "id": self.metadata.id,
            "type": "message",
            "role": "assistant",
            "model": self.metadata.model,
            "content": self._content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "stop_details": None,
            "container": None,
            "usage": self._usage,
        }

    def stream_end(self) -> Iterator[str]:
        """Yield `message_delta`, which has the stop reason and the usage, and `message_stop`."""
        body: Any = self.body()
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
        yield from self._written({"type": "message_delta", "delta": delta, "usage": body["usage"]})
        yield from self._written({"type": "message_stop"})

    def stream_error(self, error: WireError) -> Iterator[str]:
        """Yield the event `error`."""
        yield from self._written(messages_error(error, self.metadata.id)[1])

    def _read(self, event: OutputEvent) -> Iterator[Event]:
        for part in self._answer.read(event):
            yield from self._add(part)
        if event.finish_reason is not None:
            yield from self._close()
            self._stop = self._stop_of(event)

    def _add(self, part: AnswerPart) -> Iterator[Event]:
        match part:
            case MessageText(text):
                if not self._opened("text"):
                    yield from self._begin({"type": "text", "text": "", "citations": None})
                yield from self._extend(text, type="text_delta", text=text)
            case ReasoningText(text):
                if not self._opened("thinking"):
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                yield from self._extend(text, type="thinking_delta", thinking=text)
            case CallBegin(index, name):
                called = call_id(self.metadata.id, 0, index, prefix="toolu")
                block = {"type": "tool_use", "id": called, "name": name, "input": {}, "caller": {"type": "direct"}}
                yield from self._begin(block)
            case CallArguments(_, text) if self._opened("tool_use"):
                yield from self._extend(text, type="input_json_delta", partial_json=text)
            case CallEnd() if self._opened("tool_use"):
                yield from self._close()

    def _opened(self, kind: str) -> bool:
        return self._open.get("type") == kind

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open, self._text = block, StringIO()
        yield self._event("start", content_block=dict(block))

    def _extend(self, text: str, /, **delta: str) -> Iterator[Event]:
        self._text.write(text)
        if not (self._omits_thinking and self._opened("thinking")):
            yield self._event("delta", delta=delta)

    def _close(self) -> Iterator[Event]:
        if not (block := self._open):
            return
        text = self._text.getvalue()
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        elif block["type"] == "text":
            block["text"] = text
        else:
            shown, signature = ("", write_reasoning(text)) if self._omits_thinking else (text, _SHOWN)
            block["thinking"], block["signature"] = shown, signature
            yield self._event("delta", delta={"type": "signature_delta", "signature": signature})
        yield self._event("stop")
        self._content.append(block)
        self._open = {}

    def _event(self, kind: str, **fields: Any) -> Event:
        """Return an event about the open block."""
        return {"type": f"content_block_{kind}", "index": len(self._content), **fields}

    def _stop_of(self, event: OutputEvent) -> tuple[StopReason, str | None]:
        """Return the stop reason and the stop sequence."""
        if event.finish_reason == "length":
            return "max_tokens", None
        if self._answer.has_called:
            return "tool_use", None
        return ("stop_sequence", event.stop_reason) if isinstance(event.stop_reason, str) else ("end_turn", None)

    @property
    def _usage(self) -> MessagesUsage:
        usage = self.usage.body
        num_read = usage["prompt_tokens_details"]["cached_tokens"]
        num_created = max(0, self._num_cacheable - num_read)
        return {
            "input_tokens": usage["prompt_tokens"] - num_read - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": num_read,
            "cache_creation": None,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._answer.num_reasoning_tokens},
            "server_tool_use": None,
            "service_tier": None,
            "inference_geo": None,
            **self.usage.extensions,
        }


def _input(text: str) -> dict[str, Any]:
    """Return a call's arguments; an empty object if the answer ended inside them, or they are not valid JSON."""
    try:
        return _INPUT.decode(text)
    except (ValueError, RecursionError):
        return {}
