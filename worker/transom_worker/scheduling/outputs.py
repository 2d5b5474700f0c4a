"""`SequenceOutput`: what the scheduler hands to the engine for each sampled token."""

from typing import NamedTuple

from transom_core.contract import LogprobTable, TokenLogprobs
from transom_worker.scheduling.step import PolicyQuality


class SequenceOutput(NamedTuple):
    """One new token of one request.

    `position` is the token's index in the output, including output that the request arrived with (a stream that migrated from a
    lost worker). `prompt_logprobs` is set once, with the first token: it has the prompt's second token and all after it.
    `at_limit`: the request has reached its length limit, and the engine must finish it. What the first admission found is set with
    the first token, and 0 later.
    """

    request_id: str
    token_id: int
    position: int
    num_cached_tokens: int  # prompt tokens that the first admission found in the prefix cache
    index_version: int  # version of the prefix index that the first admission searched
    is_first: bool
    at_limit: bool
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: LogprobTable | None = None
    quality: PolicyQuality | None = None  # set if the step has compared the request's KV policy with full attention
    num_host_tokens: int = 0  # those of `num_cached_tokens` that only the host tier had
    embedding: list[float] | None = None  # of the prompt, set with its first token if the request asks for it
