"""Builds engine requests from checked bodies: one `contract.Request` per prompt and choice, with all defaults resolved.

Example: 2 prompts with `n` 3 become 6 requests `cmpl-x-0-0`, `cmpl-x-0-1`, ... `cmpl-x-1-2`; their choice indices are 0 to 5.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from transom_cluster.openai.prompts import Prompt, check_vocabulary
from transom_worker.contract import Request, SamplingParams
from transom_worker.errors import PromptTooLong, RequestError

MAX_PROMPT_TOKENS = 2**21
"""Most prompt tokens of all choices of one HTTP request together. One prompt may be longer if the model allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The model's limits, against which the router checks a request before it goes to a worker."""

    max_model_len: int
    vocab_size: int


def build_requests(
    response_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    limits: ModelLimits,
    *,
    time_left_s: float | None = None,
    engine_seed: int | None = None,
    priority: int = 0,
    max_priority: int = 0,
    cache_salt: str | None = None,
    prompt_param: str = "prompt",
) -> list[Request]:
    """Build one request per prompt and choice, in the order of OpenAI's choice indices: all choices of a prompt, then the next
    prompt.

    A request without a seed gets the engine's configured seed, or else a random seed per prompt.

    Raises:
        RequestError: a token id is outside the vocabulary, the prompts have too many tokens together, or the priority is outside
            `-max_priority ... max_priority`.
        PromptTooLong: a prompt, or prompt and output together, exceeds the model's length.
    """
    single = params.single()
    _check_priority(priority, max_priority)
    _check_params(params, limits)
    _check_total(prompts, params.n, limits.max_model_len, param=prompt_param)
    requests = []
    for p, prompt in enumerate(prompts):
        check_vocabulary(prompt.token_ids, limits.vocab_size, param=prompt_param)
        _check_length(len(prompt.token_ids), params.max_tokens, limits.max_model_len, param=prompt_param)
        seed = _resolve_seed(params.seed, engine_seed)
        for choice in range(params.n):
            requests.append(
                Request(
                    request_id=f"{response_id}-{p}-{choice}",
                    prompt_token_ids=prompt.token_ids,
                    params=single,
                    seed=seed,
                    choice_index=choice,
                    time_left_s=time_left_s,
                    priority=priority,
                    cache_salt=cache_salt,
                    turn_boundaries=prompt.turn_boundaries,
                )
            )
    return requests


def _resolve_seed(given: int | None, configured: int | None) -> int:
    if given is not None:
        return given
    return secrets.randbits(63) if configured is None else configured


def _check_priority(priority: int, max_priority: int) -> None:
    if abs(priority) > max_priority:
        given = priority if abs(priority) < 2**63 else f"a number of {len(str(priority))} digits"
        raise RequestError(
            f"priority is {given}; this server takes priorities from {-max_priority} (runs first) to {max_priority} "
            "(runs last). Send one of these, or none, which means 0.",
            param="priority",
        )


def _check_params(params: SamplingParams, limits: ModelLimits) -> None:
    check_vocabulary(params.stop_token_ids, limits.vocab_size, param="stop_token_ids")
    check_vocabulary(tuple(params.logit_bias), limits.vocab_size, param="logit_bias")


def _check_total(prompts: Sequence[Prompt], num_choices: int, max_model_len: int, *, param: str) -> None:
    num_tokens = num_choices * sum(len(prompt.token_ids) for prompt in prompts)
    max_tokens = max(MAX_PROMPT_TOKENS, max_model_len)
    if num_tokens > max_tokens:
        raise RequestError(
            f"The prompts have {num_tokens:,} tokens in all, counted once for each of {num_choices} choices; "
            f"at most {max_tokens:,} are allowed in one request.",
            param=param,
        )


def _check_length(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, param: str) -> None:
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
