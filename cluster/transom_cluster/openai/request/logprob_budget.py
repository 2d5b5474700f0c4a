"""Refuses requests whose response would have too many log-probabilities.

An *entry* is one token with its log-probability: every position has the chosen token and `logprobs` alternatives. An entry takes 12
bytes in the router until it is sent, and 30 to 100 bytes of JSON. Without a bound 100 KB of request could ask for 1.4 GB: 128
choices that each echo 50,000 prompt tokens with 20 alternatives have 134 million entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_cluster.openai.request.prompt_limits import ModelLimits
from transom_core.contract import SamplingParams
from transom_core.errors import RequestError

MAX_LOGPROB_ENTRIES = 2**22
"""Most entries of one response. One sequence of the model's length may have more."""


def check_logprob_budget(
    prompt_lengths: Sequence[int], params: SamplingParams, limits: ModelLimits, *, param: str
) -> None:
    """Check the number of log-probabilities that a response may have: tokens x (logprobs + 1) x n.

    Echoed prompts count with all tokens, and outputs with `max_tokens` tokens, or up to the model's length without it.

    Raises:
        RequestError: they are more than `MAX_LOGPROB_ENTRIES`, and than one sequence of the model's length has.
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
