"""Builds engine requests from checked bodies: one `contract.Request` per prompt and choice, with all defaults resolved.

Example: 2 prompts with `n` 3 become 6 requests `cmpl-x-0-0`, `cmpl-x-0-1`, ... `cmpl-x-1-2`; their choice indices are 0 to 5.

A request is validated in two places: here, before it leaves the router, and at the worker (`scheduling.request_validation`), which
does not rely on the router's checks.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from transom_cluster.openai.request.request_limits import (
    ModelLimits,
    check_choices,
    check_length,
    check_logprob_budget,
    check_total,
)
from transom_cluster.openai.request.token_id_lists import check_vocabulary
from transom_core.contract import KvPolicy, Request, SamplingParams
from transom_core.errors import RequestError
from transom_core.grammar import CheckedGrammar
from transom_core.text.chat_template import Prompt


def build_requests(
    response_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    limits: ModelLimits,
    *,
    client: str = "",
    client_weight: float = 1.0,
    time_left_s: float | None = None,
    engine_seed: int | None = None,
    priority: int = 0,
    max_priority: int = 0,
    cache_salt: str | None = None,
    prompt_cache_key: str | None = None,
    kv_policy: KvPolicy | None = None,
    kv_quality: bool = False,
    grammar: CheckedGrammar | None = None,
    prompt_param: str = "prompt",
    logprobs_param: str = "logprobs",
) -> list[Request]:
    """Build one request per prompt and choice, in the order of OpenAI's choice indices: all choices of a prompt, then the next
    prompt.

    A request without a seed gets the engine's configured seed, or else a random seed per prompt. Only the first choice of a prompt
    asks for the prompt's log-probabilities, which all choices share.

    Raises:
        RequestError: a token id is outside the vocabulary, the prompts have too many tokens together, the response could have too
            many log-probabilities, or the priority is outside `-max_priority ... max_priority`.
        PromptTooLong: a prompt, or prompt and output together, exceeds the model's length.
    """
    first = params.single()
    further = first if first.prompt_logprobs is None else replace(first, prompt_logprobs=None)
    _check_priority(priority, max_priority)
    _check_params(params, limits)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    check_choices(len(prompts), params.n, limits, param="n")
    check_total(sum(lengths), params.n, limits, param=prompt_param)
    check_logprob_budget(lengths, params, limits, param=logprobs_param)
    requests = []
    for p, prompt in enumerate(prompts):
        check_vocabulary(prompt.token_ids, limits.vocab_size, param=prompt_param)
        check_length(len(prompt.token_ids), params.max_tokens, limits, param=prompt_param)
        seed = _resolve_seed(params.seed, engine_seed)
        for choice in range(params.n):
            requests.append(
                Request(
                    request_id=f"{response_id}-{p}-{choice}",
                    prompt_token_ids=prompt.token_ids,
                    params=further if choice else first,
                    seed=seed,
                    choice_index=choice,
                    client=client,
                    client_weight=client_weight,
                    time_left_s=time_left_s,
                    priority=priority,
                    cache_salt=cache_salt,
                    prompt_cache_key=prompt_cache_key,
                    turn_boundaries=prompt.turn_boundaries,
                    kv_policy=kv_policy,
                    kv_quality=kv_quality,
                    grammar=None if grammar is None else grammar.text,
                    grammar_bytes=0 if grammar is None else grammar.num_bytes,
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
