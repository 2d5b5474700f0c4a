"""Counts the tokens of one HTTP request for `usage`: each prompt once, and the output tokens of all its choices."""

from __future__ import annotations

from collections.abc import Sequence

from transom_cluster.openai.response_types import UsageObject
from transom_worker.contract import OutputEvent, Request, Usage


class UsageTotals:
    """Adds up the token counts of output events; complete when every choice has ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._last_usage: list[Usage | None] = [None] * len(requests)
        self._num_output_tokens = [0] * len(requests)

    def add(self, index: int, event: OutputEvent) -> None:
        """Add one output event of choice `index`."""
        self._num_output_tokens[index] += len(event.token_ids)
        if event.usage is not None:
            self._last_usage[index] = event.usage

    @property
    def body(self) -> UsageObject:
        """OpenAI's usage object."""
        prompt_tokens = cached_tokens = 0
        for request, usage in zip(self._requests, self._last_usage, strict=True):
            if request.choice_index == 0:
                prompt_tokens += request.num_prompt_tokens
                cached_tokens += 0 if usage is None else usage.num_cached_tokens
        output_tokens = sum(self._num_output_tokens)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
