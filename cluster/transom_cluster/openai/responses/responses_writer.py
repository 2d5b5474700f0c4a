"""`ResponsesWriter`: writes the answer of /v1/responses, as one object or as a stream of events.

A stream has the events `response.created`, `response.in_progress`, those of each output item (`output_items`), and at last
`response.completed`, `response.incomplete` (the output has reached its maximum length) or `response.failed`. The field
`sequence_number` counts the events from 0. There is no `[DONE]`: the last event ends the stream.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.error_responses import WireError
from transom_cluster.openai.answer.json_pieces import JsonText
from transom_cluster.openai.answer.writers import Event, EventWriter, ResponseMetadata
from transom_cluster.openai.responses.object_types import ResponseError, ResponseUsage
from transom_cluster.openai.responses.output_items import ItemOptions, OutputItems
from transom_core.contract import FinishReason, OutputEvent, Request
from transom_core.text.markup.parts import MessageText

Status = Literal["completed", "failed", "in_progress", "incomplete"]


class ResponsesWriter(EventWriter):
    """Writes one response, from one choice that `answer` parses. `echo` has the request's fields that the response repeats."""

    def __init__(
        self,
        metadata: ResponseMetadata,
        requests: Sequence[Request],
        answer: AnswerReader,
        options: ItemOptions,
        echo: Mapping[str, JsonText],
    ) -> None:
        super().__init__(metadata, requests, readers=[answer])
        self._answer = answer
        self._echo = echo
        self._items = OutputItems(options)
        self._num_events = 0
        self._finish_reason: FinishReason | None = None
        self._completed_s: int | None = None

    def chunks(self, index: int, event: OutputEvent) -> Iterator[str]:
        """Yield the server-sent events for one output event of the engine."""
        if self._num_events == 0:
            yield from self._written({"type": "response.created", "response": self._object("in_progress")})
            yield from self._written({"type": "response.in_progress", "response": self._object("in_progress")})
        for told in self._read(event):
            yield from self._written(told)

    def body(self) -> Mapping[str, Any]:
        """Return a `response` object."""
        return self._object(self._final_status)

    def stream_end(self) -> Iterator[str]:
        """Yield `response.completed` or `response.incomplete`."""
        status = self._final_status
        yield from self._written({"type": f"response.{status}", "response": self._object(status)})

    def stream_error(self, error: WireError) -> Iterator[str]:
        """Yield `response.failed`, with the items that were sent so far."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._object("failed", error={"code": code, "message": error.body["error"]["message"]})
        yield from self._written({"type": "response.failed", "response": failed})

    @property
    def _final_status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _read(self, event: OutputEvent) -> Iterator[Event]:
        """Yield the stream events for one output event; the last output event also ends the answer."""
        parts = self._answer.read(event)
        logprobs = self._answer.message_logprobs(event)
        for part in parts:
            if isinstance(part, MessageText):
                yield from self._items.add(part, logprobs)
                logprobs = []
            else:
                yield from self._items.add(part)
        if event.finish_reason is not None:
            self._finish_reason = event.finish_reason
            self._completed_s = int(time.time())
            yield from self._items.end(self._final_status)

    def _written(self, event: Mapping[str, Any]) -> Iterator[str]:
        """Yield a server-sent event in pieces, with the next sequence number."""
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        yield from super()._written(numbered)

    def _object(self, status: Status, *, error: ResponseError | None = None) -> dict[str, Any]:
        is_incomplete = status == "incomplete"
        return {
            "id": self.metadata.id,
            "object": "response",
            "created_at": self.metadata.created_s,
            "completed_at": self._completed_s if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "model": self.metadata.model,
            "output": self._items.bodies,
            **({} if status in ("in_progress", "failed") else {"usage": self._usage}),
            **self._echo,
        }

    @property
    def _usage(self) -> ResponseUsage:
        usage = self.usage.body
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
            **self.usage.extensions,
        }
