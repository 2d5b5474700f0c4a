"""The limits of prompts' lengths: of one prompt, by the model, and of all prompts of one HTTP request together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transom_core.contract import KvPolicy, check_kv_policy, max_stream_len
from transom_core.errors import PromptTooLong, RequestError

MAX_PROMPT_TOKENS = 2**21
"""Most prompt tokens of all choices of one HTTP request together. One prompt may be longer if the model allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The model's limits, against which the router checks a request before it goes to a worker.

    `block_size` is that of the KV cache's blocks in tokens; `kv_policy_obstacle` says why the model's layers cannot follow a KV
    policy, and is empty if they can. `max_stream_len` is the longest stream of one request, if its policy lets it run past the
    model's length.
    """

    max_model_len: int
    vocab_size: int
    block_size: int = 16
    kv_policy_obstacle: str = ""
    max_stream_len: int | None = None

    @property
    def longest(self) -> int:
        """The most tokens, prompt and output together, that a request with these limits may have."""
        return self.max_stream_len or self.max_model_len

    def with_kv_policy(self, policy: KvPolicy | None, *, kv_quality: bool, max_tokens: int | None) -> ModelLimits:
        """Return the limits of a request with a KV policy (None: without one) that asks for `max_tokens` output tokens.

        Raises:
            RequestError: the model cannot take the policy, or only with other sizes.
        """
        check_kv_policy(
            policy,
            kv_quality=kv_quality,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            obstacle=self.kv_policy_obstacle,
        )
        longest = max_stream_len(policy, kv_quality=kv_quality, max_tokens=max_tokens, max_model_len=self.max_model_len)
        return replace(self, max_stream_len=longest)


def check_total(num_tokens: int, num_choices: int, limits: ModelLimits, *, param: str) -> None:
    """Check the number of tokens of all prompts, of which each counts once for each of its choices. Raises RequestError."""
    num_counted = num_tokens * num_choices
    max_tokens = max(MAX_PROMPT_TOKENS, limits.longest)
    if num_counted > max_tokens:
        raise RequestError(
            f"The prompts have {num_counted:,} tokens in all, counted once for each of {num_choices} choices; "
            f"at most {max_tokens:,} are allowed in one request.",
            param=param,
        )


def check_length(num_prompt_tokens: int, max_tokens: int | None, limits: ModelLimits, *, param: str) -> None:
    """Check that a prompt, and as many output tokens as the request asks for, fit the model's length. Raises PromptTooLong."""
    max_model_len = limits.longest
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
