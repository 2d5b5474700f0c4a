"""Writes responses of /v1/completions: `text_completion` objects, whole or as a stream of chunks; `echo` puts the prompt first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transom_cluster.openai.logprobs import CompletionLogprobs, TokenBytes
from transom_cluster.openai.response_types import Completion, TextChoice, TextLogprobs
from transom_cluster.openai.writers import FINGERPRINT, ResponseMetadata, ResponseWriter, final_finish_reason
from transom_worker import contract
from transom_worker.contract import OutputEvent, Request, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """The prompt that `echo` puts before a choice's text."""

    text: str
    token_ids: tuple[int, ...]


class CompletionWriter(ResponseWriter):
    """Writes text completions.

    With `num_top_logprobs` None the response has no log-probabilities. `echoed` has one prompt per choice, or is None without
    `echo`. With `echo_only` (`echo` and `max_tokens` 0) the engine computes one token, and the writer leaves it out.
    """

    chunk_kind = "text_completion"

    def __init__(
        self,
        metadata: ResponseMetadata,
        requests: Sequence[Request],
        tokenizer: TokenBytes,
        *,
        include_usage: bool = False,
        num_top_logprobs: int | None = None,
        echoed: Sequence[EchoedPrompt] | None = None,
        echo_only: bool = False,
    ) -> None:
        super().__init__(metadata, requests, include_usage=include_usage)
        self._echoed = echoed
        self._echo_only = echo_only
        self._has_started = [False] * len(requests)
        self._logprobs = None
        if num_top_logprobs is not None:
            self._logprobs = [CompletionLogprobs(num_top_logprobs, tokenizer) for _ in requests]
        self._text_openings = [f'{self._opening}{i},"text":' for i in range(len(requests))]
        self._text_closing = f',"logprobs":null,"finish_reason":null{self._closing}'

    def shown_event(self, event: OutputEvent) -> OutputEvent:
        """The event; with `echo_only` without its token."""
        if not self._echo_only:
            return event
        reason: contract.FinishReason | None = event.finish_reason and "length"
        return replace(event, token_ids=(), text="", logprobs=None, finish_reason=reason)

    def chunk(self, index: int, event: OutputEvent) -> str:
        """Text and finish reason. The first chunk of a choice begins with the echoed prompt."""
        text, logprobs = self._text_and_logprobs(index, event)
        if logprobs is None and event.finish_reason is None:
            return self._text_openings[index] + json.dumps(text) + self._text_closing if text else ""
        return (
            f'{self._text_openings[index]}{json.dumps(text)},"logprobs":{json.dumps(logprobs)},'
            f'"finish_reason":{json.dumps(event.finish_reason)}{self._closing}'
        )

    def body(self, events: Sequence[Sequence[OutputEvent]]) -> Completion:
        """A `text_completion` object."""
        return {
            "id": self.metadata.id,
            "object": "text_completion",
            "created": self.metadata.created_s,
            "model": self.metadata.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [self._choice(index, choice_events) for index, choice_events in enumerate(events)],
            "usage": self.usage.body,
        }

    def _choice(self, index: int, events: Sequence[OutputEvent]) -> TextChoice:
        text = ""
        logprobs: TextLogprobs | None = None
        for event in events:
            event_text, event_logprobs = self._text_and_logprobs(index, event)
            text += event_text
            if event_logprobs is not None:
                logprobs = event_logprobs if logprobs is None else _concatenated(logprobs, event_logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": final_finish_reason(events)}

    def _text_and_logprobs(self, index: int, event: OutputEvent) -> tuple[str, TextLogprobs | None]:
        """Text and log-probabilities of one event; the choice's first event begins with the echoed prompt."""
        text = event.text
        positions: list[tuple[int, TokenLogprobs | None]] = []
        if not self._has_started[index]:
            self._has_started[index] = True
            if self._echoed is not None:
                text = self._echoed[index].text + text
                positions += zip(self._echoed[index].token_ids, event.prompt_logprobs or (), strict=False)
        positions += zip(event.token_ids, event.logprobs or (), strict=False)
        if self._logprobs is None or not positions:
            return text, None
        return text, self._logprobs[index].next_tokens(positions)


def _concatenated(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }
