"""text_completion, whole and as chunks, with `echo`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transom_cluster.openai.logprobs import CompletionLogprobs, TokenNames
from transom_cluster.openai.writers import ResponseMetadata, Writer, last_finish_reason
from transom_worker.contract import FinishReason, OutputEvent, Request, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """What `echo` puts before an answer."""

    text: str
    token_ids: tuple[int, ...]


class CompletionWriter(Writer):
    """Writes plain completions.

    `num_top_logprobs` None: no log-probabilities. `echoed` has one prompt per choice, or is None without `echo`. With
    `echo_only` the one token that was computed is left out.
    """

    chunk_kind = "text_completion"

    def __init__(
        self,
        header: ResponseMetadata,
        requests: Sequence[Request],
        names: TokenNames,
        *,
        include_usage: bool = False,
        num_top_logprobs: int | None = None,
        echoed: Sequence[EchoedPrompt] | None = None,
        echo_only: bool = False,
    ) -> None:
        super().__init__(header, requests, include_usage=include_usage)
        self._echoed = echoed
        self._echo_only = echo_only
        self._started = [False] * len(requests)
        self._logprobs = None
        if num_top_logprobs is not None:
            self._logprobs = [CompletionLogprobs(num_top_logprobs, names) for _ in requests]
        self._text_openings = [f'{self._opening}{i},"text":' for i in range(len(requests))]
        self._text_closing = f',"logprobs":null,"finish_reason":null{self._closing}'

    def shown(self, event: OutputEvent) -> OutputEvent:
        """With `echo_only`, the event without its token."""
        if not self._echo_only:
            return event
        reason: FinishReason | None = event.finish_reason and "length"
        return replace(event, token_ids=(), text="", logprobs=None, finish_reason=reason)

    def chunk(self, index: int, event: OutputEvent) -> str:
        """Text and finish reason; the first chunk of a choice starts with the echoed prompt."""
        text, logprobs = self._part(index, event)
        if logprobs is None and event.finish_reason is None:
            return self._text_openings[index] + json.dumps(text) + self._text_closing if text else ""
        return (
            f'{self._text_openings[index]}{json.dumps(text)},"logprobs":{json.dumps(logprobs)},'
            f'"finish_reason":{json.dumps(event.finish_reason)}{self._closing}'
        )

    def body(self, events: Sequence[Sequence[OutputEvent]]) -> dict[str, Any]:
        """A text_completion."""
        choices = [self._choice(index, own) for index, own in enumerate(events)]
        return {**self.header.fields("text_completion"), "choices": choices, "usage": self.usage.body}

    def _choice(self, index: int, events: Sequence[OutputEvent]) -> dict[str, Any]:
        text = ""
        logprobs: dict[str, list[Any]] | None = None
        for event in events:
            part, part_logprobs = self._part(index, event)
            text += part
            if part_logprobs is not None:
                logprobs = _joined(logprobs, part_logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": last_finish_reason(events)}

    def _part(self, index: int, event: OutputEvent) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of one event, the echoed prompt before the first."""
        text = event.text
        positions: list[tuple[int, TokenLogprobs | None]] = []
        if not self._started[index]:
            self._started[index] = True
            if self._echoed is not None:
                text = self._echoed[index].text + text
                positions += zip(self._echoed[index].token_ids, event.prompt_logprobs or (), strict=False)
        positions += zip(event.token_ids, event.logprobs or (), strict=False)
        if self._logprobs is None or not positions:
            return text, None
        return text, self._logprobs[index].object(positions)


def _joined(logprobs: dict[str, list[Any]] | None, more: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return more if logprobs is None else {name: logprobs[name] + values for name, values in more.items()}
