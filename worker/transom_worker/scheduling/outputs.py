"""What the scheduler hands to the engine for each token."""

from __future__ import annotations

from typing import NamedTuple

from transom_worker.contract import TokenLogprobs


class SequenceOutput(NamedTuple):
    """One new token of one request.

    `position` is its output index, resumed tokens counted. `prompt_logprobs` comes once, with the first token: one per prompt
    token, the first None. `at_limit` says that nothing follows: the engine must finish the request.
    """

    request_id: str
    token_id: int
    position: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache at first admission
    index_version: int  # of the prefix index that was searched then
    is_first: bool
    at_limit: bool
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
