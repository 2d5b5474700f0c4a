"""The request bodies of POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from transom_cluster.openai.body import WireModel
from transom_cluster.openai.chat_types import MAX_MESSAGES, ChatMessage
from transom_cluster.openai.sampling_fields import SamplingFields
from transom_worker.contract import MAX_LOGPROBS, SamplingParams
from transom_worker.errors import RequestError

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_CHOICES = 1024  # a worker could never admit more of them together (--max-waiting), so a retry would not help


class CompletionRequest(SamplingFields):
    """The supported fields; docs/http_api.md lists those that are ignored or refused."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        examples=["Once upon a time", ["One", "Two"], [72, 105]]
    )
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @property
    def echo_only(self) -> bool:
        """Whether the client wants only the prompt back, with its log-probabilities: `echo` with `max_tokens` 0."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts of this batch: all texts, or all lists of token ids.

        Raises:
            RequestError: there is no prompt, or there are too many choices.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is an empty list; send at least one prompt.", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise RequestError(
                f"prompt has {len(self.prompt)} prompts and n is {self.n or 1}; at most {MAX_CHOICES} choices a request.",
                param="prompt",
            )
        return self.prompt

    def params(self) -> SamplingParams:
        """Build the worker contract's sampling parameters. With `echo_only` the engine computes one token, which the writer drops.

        Raises:
            RequestError: a value is out of range or contradicts another.
        """
        self.check_stream_options()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of is {self.best_of}; only best_of equal to n is supported.", param="best_of")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(
            max_tokens=1 if self.echo_only else max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class TokenizeRequest(WireModel):
    """A text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = Field(None, examples=["Once upon a time"])
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None  # default: true for a prompt; for messages the chat template decides
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(WireModel):
    """Token ids to decode."""

    model: str | None = None
    tokens: list[int] = Field(examples=[[72, 105]])
