"""Checks the limits of one HTTP request: the length of each prompt, the tokens of all prompts, and the number of log-probabilities.

An *entry* is one token with its log-probability: every position has one for the chosen token and `logprobs` for alternatives. An
entry takes 12 bytes in the router until it is sent, and 30 to 100 bytes of JSON. Without a limit, a request of 100 KB could make
the router hold 1.6 GB: 128 choices that each echo 50,000 prompt tokens with 20 alternatives have 134 million entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transom_cluster.openai.request.token_id_lists import check_vocabulary
from transom_core.config import MAX_CHOICES
from transom_core.contract import KvPolicy, SamplingParams, check_kv_policy, max_prompt_len, max_stream_len
from transom_core.errors import PromptTooLong, RequestError

MAX_PROMPT_TOKENS = 2**21
"""The maximum number of prompt tokens of all choices of one HTTP request together. One prompt may be longer if the model allows
it."""
MAX_TOKENIZE_BYTES = 2**21
"""The maximum number of bytes of text in one request to /tokenize, and so of tokens, since every token has at least one byte. The
limits are higher if the model's length is greater."""
LONG_TOKEN_BYTES = 8  # most texts have fewer bytes per token, so a text of the model's length is accepted
MAX_LOGPROB_ENTRIES = 2**22
"""The maximum number of entries of one response. A response with one sequence of the model's length may have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The model's limits, against which the router checks a request before it goes to a worker.

    `block_size` is the number of tokens in a KV cache block, which later requests may find if the worker `caches_prefixes`.
    `kv_policy_obstacle` says why the model's layers cannot follow a KV policy; it is empty if they can. `kv_policy` is the
    request's own, and `max_stream_len` its longest stream if the policy lets it run past the model's length. `max_choices` is the
    server's own limit on the sequences of one request. Embeddings have up to `hidden_size` dimensions.
    """

    max_model_len: int
    vocab_size: int
    block_size: int = 16
    caches_prefixes: bool = True
    kv_policy_obstacle: str = ""
    kv_policy: KvPolicy | None = None
    max_stream_len: int | None = None
    max_choices: int = MAX_CHOICES
    hidden_size: int = 0

    @property
    def longest(self) -> int:
        """Return the most tokens, prompt and output together, that a request with these limits may have."""
        return self.max_stream_len or self.max_model_len

    @property
    def longest_prompt(self) -> int:
        """Return the smallest number of prompt tokens that is refused even if the request asks for little output."""
        return max_prompt_len(self.longest, self.max_model_len)

    def with_kv_policy(self, policy: KvPolicy | None, *, kv_quality: bool, max_tokens: int | None) -> ModelLimits:
        """Return the limits of a request with a KV policy (None: without one) that asks for `max_tokens` output tokens.

        Raises:
            RequestError: the model does not support the policy, or not with these sizes.
        """
        check_kv_policy(
            policy,
            kv_quality=kv_quality,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            obstacle=self.kv_policy_obstacle,
        )
        longest = max_stream_len(policy, kv_quality=kv_quality, max_tokens=max_tokens, max_model_len=self.max_model_len)
        return replace(self, kv_policy=policy, max_stream_len=longest)


def check_prompts(prompts: Sequence[Sequence[int]], params: SamplingParams, limits: ModelLimits, *, param: str) -> None:
    """Check the token ids of all prompts of a request, and its parameters that depend on the model; `param` is the prompts' field.

    Raises:
        RequestError: a token id is outside the vocabulary, the prompts have too many choices or tokens together, or the response
            could have too many log-probabilities.
        PromptTooLong: a prompt, or prompt and output together, exceeds the model's length.
    """
    check_vocabulary(params.stop_token_ids, limits.vocab_size, param="stop_token_ids")
    check_vocabulary(tuple(params.logit_bias), limits.vocab_size, param="logit_bias")
    lengths = [len(token_ids) for token_ids in prompts]
    check_choices(len(prompts), params.n, limits, param="n")
    check_total(sum(lengths), params.n, limits, param=param)
    check_logprob_budget(lengths, params, limits, param="top_logprobs" if param == "messages" else "logprobs")
    for token_ids in prompts:
        check_vocabulary(token_ids, limits.vocab_size, param=param)
        check_length(len(token_ids), params.max_tokens, limits, param=param)


def check_choices(num_prompts: int, num_choices: int, limits: ModelLimits, *, param: str) -> None:
    """Check the number of sequences that a request becomes: one per prompt and choice. Raises RequestError."""
    if num_prompts * num_choices > limits.max_choices:
        raise RequestError(
            f"The request has {num_prompts} prompts and n is {num_choices}; at most {limits.max_choices} choices a request. Send "
            "several requests, or ask the server's operator for a higher --max-choices.",
            param=param,
        )


def check_total(num_tokens: int, num_choices: int, limits: ModelLimits, *, param: str) -> None:
    """Check the number of tokens of all prompts. Each prompt counts once for each of its choices. Raises RequestError."""
    num_counted = num_tokens * num_choices
    max_tokens = max(MAX_PROMPT_TOKENS, limits.longest)
    if num_counted > max_tokens:
        raise RequestError(
            f"The prompts have {num_counted:,} tokens in all, counted once for each of {num_choices} choices; "
            f"at most {max_tokens:,} are allowed in one request.",
            param=param,
        )


def check_length(
    num_prompt_tokens: int, max_tokens: int | None, limits: ModelLimits, *, param: str, at_least: bool = False
) -> None:
    """Check that a prompt and the output tokens that the request asks for fit the model's length. Raises PromptTooLong.

    With `at_least` the prompt is not fully tokenised yet, and `num_prompt_tokens` is a lower bound.
    """
    max_model_len = limits.longest
    if num_prompt_tokens >= limits.longest_prompt:
        raise PromptTooLong(
            f"The prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens, the model's maximum context length is "
            f"{limits.longest_prompt} tokens (prompt and output together); shorten the prompt.",
            param=param,
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise PromptTooLong(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, the model's maximum context "
            f"length is {max_model_len} tokens; shorten the prompt, or ask for at most "
            f"{max_model_len - num_prompt_tokens} tokens.",
            param=param,
        )


def check_tokenize_bytes(num_bytes: int, limits: ModelLimits, *, param: str) -> None:
    """Check the length of a text of /tokenize before it is encoded. Raises RequestError."""
    most = max(MAX_TOKENIZE_BYTES, limits.max_model_len * LONG_TOKEN_BYTES)
    if num_bytes > most:
        raise RequestError(
            f"{param} has {num_bytes:,} bytes of text; at most {most:,} are tokenised at once. Send it in parts.",
            param=param,
        )


def check_tokenize_tokens(num_tokens: int, limits: ModelLimits, *, param: str, at_least: bool = False) -> None:
    """Check the number of tokens that a response of /tokenize would have. Raises PromptTooLong.

    With `at_least` the text is not fully tokenised yet, and `num_tokens` is a lower bound.
    """
    most = max(MAX_TOKENIZE_BYTES, limits.max_model_len)
    if num_tokens > most:
        raise PromptTooLong(
            f"{param} has {'at least ' if at_least else ''}{num_tokens:,} tokens; at most {most:,} are listed at once.",
            param=param,
        )


def check_logprob_budget(
    prompt_lengths: Sequence[int], params: SamplingParams, limits: ModelLimits, *, param: str
) -> None:
    """Check the number of log-probabilities that a response may have: tokens x (logprobs + 1) x n, since each position has an entry
    for the chosen token and one for each alternative, in each of n choices.

    An echoed prompt counts all its tokens. An output counts `max_tokens` tokens, or, without `max_tokens`, as many as still fit the
    model's length.

    Raises:
        RequestError: there are more than `MAX_LOGPROB_ENTRIES`, and also more than one sequence of the model's length has.
    """
    top, prompt_top = params.logprobs, params.prompt_logprobs
    if top is None and prompt_top is None:
        return
    num_prompt = 0 if prompt_top is None else sum(prompt_lengths)
    num_output = 0 if top is None else sum(_longest_output(length, params, limits) for length in prompt_lengths)
    per_token = 1 + max(top or 0, prompt_top or 0)
    num_entries = (num_prompt + num_output) * per_token * params.n
    most = max(MAX_LOGPROB_ENTRIES, limits.max_model_len * per_token)
    if num_entries > most:
        raise RequestError(
            f"The response could have {num_entries:,} log-probabilities: {num_prompt:,} echoed prompt tokens and up to "
            f"{num_output:,} output tokens, times {per_token} (the token and {per_token - 1} alternatives), times n = "
            f"{params.n}. At most {most:,} are allowed in one response: lower {param}, n or max_tokens, or send fewer or "
            "shorter prompts.",
            param=param,
        )


def _longest_output(num_prompt_tokens: int, params: SamplingParams, limits: ModelLimits) -> int:
    most = max(0, limits.longest - num_prompt_tokens)  # a prompt that is too long is refused with its own message
    return most if params.max_tokens is None else min(params.max_tokens, most)
