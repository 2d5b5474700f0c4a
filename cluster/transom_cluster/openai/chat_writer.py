"""Writes responses of /v1/chat/completions: `chat.completion` as a whole, `chat.completion.chunk` in a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence

from transom_cluster.openai.logprobs import TokenBytes, chat_logprobs
from transom_cluster.openai.response_types import ChatChoice, ChatCompletion, ChatLogprobs
from transom_cluster.openai.writers import FINGERPRINT, ResponseMetadata, ResponseWriter, final_finish_reason
from transom_worker.contract import OutputEvent, Request, TokenLogprobs


class ChatWriter(ResponseWriter):
    """Writes chat completions. With `num_top_logprobs` None the response has no log-probabilities."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        metadata: ResponseMetadata,
        requests: Sequence[Request],
        tokenizer: TokenBytes,
        *,
        include_usage: bool = False,
        num_top_logprobs: int | None = None,
    ) -> None:
        super().__init__(metadata, requests, include_usage=include_usage)
        self._tokenizer = tokenizer
        self._num_top_logprobs = num_top_logprobs
        self._has_started = [False] * len(requests)
        self._text_openings = [f'{self._opening}{i},"delta":{{"content":' for i in range(len(requests))]
        self._text_closing = f'}},"logprobs":null,"finish_reason":null{self._closing}'

    def chunk(self, index: int, event: OutputEvent) -> str:
        """The role comes first, then text, then the finish reason in a chunk of its own, as in OpenAI's streams."""
        out = "" if self._has_started[index] else self._role_chunk(index)
        if self._num_top_logprobs is not None and event.logprobs:
            out += self._logprobs_chunk(index, event)
        elif event.text:
            out += self._text_openings[index] + json.dumps(event.text) + self._text_closing
        if event.finish_reason is not None:
            reason = json.dumps(event.finish_reason)
            out += f'{self._opening}{index},"delta":{{}},"logprobs":null,"finish_reason":{reason}{self._closing}'
        return out

    def body(self, events: Sequence[Sequence[OutputEvent]]) -> ChatCompletion:
        """A `chat.completion` object."""
        return {
            "id": self.metadata.id,
            "object": "chat.completion",
            "created": self.metadata.created_s,
            "model": self.metadata.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [self._choice(index, choice_events) for index, choice_events in enumerate(events)],
            "usage": self.usage.body,
        }

    def _role_chunk(self, index: int) -> str:
        self._has_started[index] = True
        delta = '{"role":"assistant","content":"","refusal":null}'
        return f'{self._opening}{index},"delta":{delta},"logprobs":null,"finish_reason":null{self._closing}'

    def _logprobs_chunk(self, index: int, event: OutputEvent) -> str:
        logprobs = json.dumps(self._logprobs(event.logprobs or ()))
        text = json.dumps(event.text)
        return f'{self._text_openings[index]}{text}}},"logprobs":{logprobs},"finish_reason":null{self._closing}'

    def _choice(self, index: int, events: Sequence[OutputEvent]) -> ChatChoice:
        text = "".join(event.text for event in events)
        positions = [position for event in events for position in event.logprobs or ()]
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if self._num_top_logprobs is None else self._logprobs(positions),
            "finish_reason": final_finish_reason(events),
        }

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return {"content": chat_logprobs(positions, self._num_top_logprobs or 0, self._tokenizer), "refusal": None}
