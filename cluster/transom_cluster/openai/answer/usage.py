"""Counts the tokens of one HTTP request for its `usage` object: each prompt once, and the output tokens of all its choices.

Reasoning tokens are output tokens too. `AnswerReader` also counts them separately while it parses an answer.
"""

from collections.abc import Sequence

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.openai.answer.response_types import KvQualityObject, UsageExtensions, UsageObject
from transom_core.contract import KvQuality, OutputEvent, Request, Usage


class UsageTotals:
    """Adds up the token counts of output events; the totals are complete when every choice has ended.

    `requests` has one element for each choice of each prompt. `readers` parse the answers, if the endpoint parses them.
    """

    def __init__(self, requests: Sequence[Request], readers: Sequence[AnswerReader] = ()) -> None:
        self._requests = requests
        self._readers = readers
        # For each request, the latest usage that an event reported; a request's first and last event report one.
        self._last_usage: list[Usage | None] = [None] * len(requests)
        self._num_output_tokens = [0] * len(requests)

    def add(self, index: int, event: OutputEvent) -> None:
        """Add one output event of `requests[index]`."""
        self._num_output_tokens[index] += len(event.token_ids)
        if event.usage is not None:
            self._last_usage[index] = event.usage

    @property
    def body(self) -> UsageObject:
        """Return OpenAI's usage object with the fields of `extensions`."""
        prompt_tokens = cached_tokens = 0
        for request, usage in zip(self._requests, self._last_usage, strict=True):
            if request.choice_index == 0:  # all choices of a prompt share its tokens
                prompt_tokens += request.num_prompt_tokens
                cached_tokens += 0 if usage is None else usage.num_cached_tokens
        output_tokens = sum(self._num_output_tokens)
        body: UsageObject = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        if self._readers:
            reasoning_tokens = sum(reader.num_reasoning_tokens for reader in self._readers)
            body["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return {**body, **self.extensions}

    @property
    def extensions(self) -> UsageExtensions:
        """Return the fields of Transom's own, which every API's usage has."""
        body: UsageExtensions = {}
        if num_updates := max((usage.num_weight_updates for usage in self._last_usage if usage), default=0):
            body["weight_updates"] = num_updates
        if any(request.kv_quality for request in self._requests):
            qualities = [usage.kv_quality for usage in self._last_usage if usage and usage.kv_quality]
            body["kv_quality"] = _quality(sum(qualities, KvQuality()))
        return body


def _quality(total: KvQuality) -> KvQualityObject:
    """Return means, and the maximum KL divergence, over the tokens whose logits were compared with those of a full KV cache."""
    count = total.num_tokens
    return {
        "compared_tokens": count,
        "mean_kl": total.kl / count if count else None,
        "max_kl": total.max_kl if count else None,
        "top_token_agreement": total.num_agreeing / count if count else None,
        "dropped_attention": total.dropped_mass / count if count else None,
    }
