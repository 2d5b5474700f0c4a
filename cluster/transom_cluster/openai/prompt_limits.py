"""The limits of prompts' lengths: of one prompt, by the model, and of all prompts of one HTTP request together."""

from __future__ import annotations

from dataclasses import dataclass

from transom_worker.errors import PromptTooLong, RequestError

MAX_PROMPT_TOKENS = 2**21
"""Most prompt tokens of all choices of one HTTP request together. One prompt may be longer if the model allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The model's limits, against which the router checks a request before it goes to a worker."""

    max_model_len: int
    vocab_size: int


def check_total(num_tokens: int, num_choices: int, limits: ModelLimits, *, param: str) -> None:
    """Check the number of tokens of all prompts, of which each counts once for each of its choices. Raises RequestError."""
    num_counted = num_tokens * num_choices
    max_tokens = max(MAX_PROMPT_TOKENS, limits.max_model_len)
    if num_counted > max_tokens:
        raise RequestError(
            f"The prompts have {num_counted:,} tokens in all, counted once for each of {num_choices} choices; "
            f"at most {max_tokens:,} are allowed in one request.",
            param=param,
        )


def check_length(num_prompt_tokens: int, max_tokens: int | None, limits: ModelLimits, *, param: str) -> None:
    """Check that a prompt, and as many output tokens as the request asks for, fit the model's length. Raises PromptTooLong."""
    max_model_len = limits.max_model_len
    if num_prompt_tokens >= max_model_len:
        raise PromptTooLong(
            f"The prompt has {num_prompt_tokens} tokens, the model's maximum context length is {max_model_len} tokens "
            f"(prompt and output together); shorten the prompt.",
            param=param,
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise PromptTooLong(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, the model's maximum context "
            f"length is {max_model_len} tokens; shorten the prompt, or ask for at most "
            f"{max_model_len - num_prompt_tokens} tokens.",
            param=param,
        )
