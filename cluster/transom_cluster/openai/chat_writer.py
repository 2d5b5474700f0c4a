"""chat.completion and chat.completion.chunk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transom_cluster.openai.logprobs import TokenNames, chat_logprobs
from transom_cluster.openai.writers import ResponseMetadata, Writer, last_finish_reason
from transom_worker.contract import OutputEvent, Request


class ChatWriter(Writer):
    """Writes chat answers. `num_top_logprobs` None: no log-probabilities."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        header: ResponseMetadata,
        requests: Sequence[Request],
        names: TokenNames,
        *,
        include_usage: bool = False,
        num_top_logprobs: int | None = None,
    ) -> None:
        super().__init__(header, requests, include_usage=include_usage)
        self._names = names
        self._num_top = num_top_logprobs
        self._started = [False] * len(requests)
        self._text_openings = [f'{self._opening}{i},"delta":{{"content":' for i in range(len(requests))]
        self._text_closing = f'}},"logprobs":null,"finish_reason":null{self._closing}'

    def chunk(self, index: int, event: OutputEvent) -> str:
        """Role first, then text, then the finish reason in a chunk of its own, as OpenAI does."""
        out = "" if self._started[index] else self._role_chunk(index)
        if self._num_top is not None and event.logprobs:
            out += self._logprobs_chunk(index, event)
        elif event.text:
            out += self._text_openings[index] + json.dumps(event.text) + self._text_closing
        if event.finish_reason is not None:
            reason = json.dumps(event.finish_reason)
            out += f'{self._opening}{index},"delta":{{}},"logprobs":null,"finish_reason":{reason}{self._closing}'
        return out

    def body(self, events: Sequence[Sequence[OutputEvent]]) -> dict[str, Any]:
        """A chat.completion."""
        choices = [self._choice(index, own) for index, own in enumerate(events)]
        return {**self.header.fields("chat.completion"), "choices": choices, "usage": self.usage.body}

    def _role_chunk(self, index: int) -> str:
        self._started[index] = True
        delta = '{"role":"assistant","content":"","refusal":null}'
        return f'{self._opening}{index},"delta":{delta},"logprobs":null,"finish_reason":null{self._closing}'

    def _logprobs_chunk(self, index: int, event: OutputEvent) -> str:
        logprobs = json.dumps(self._logprobs(event.logprobs or ()))
        text = json.dumps(event.text)
        return f'{self._text_openings[index]}{text}}},"logprobs":{logprobs},"finish_reason":null{self._closing}'

    def _choice(self, index: int, events: Sequence[OutputEvent]) -> dict[str, Any]:
        text = "".join(event.text for event in events)
        positions = [position for event in events for position in event.logprobs or ()]
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if self._num_top is None else self._logprobs(positions),
            "finish_reason": last_finish_reason(events),
        }

    def _logprobs(self, positions: Sequence[Any]) -> dict[str, Any]:
        return {"content": chat_logprobs(positions, self._num_top or 0, self._names), "refusal": None}
