"""Validates requests when they arrive at a worker, and refuses those that it cannot serve, with the numbers in the message.

A request is validated in two places. The router checks a client's request before it sends it to a worker
(`transom_cluster.http.prompt_request`), so that most wrong requests never arrive here. The worker checks in this module everything
that it relies on. Each condition is checked by one of four functions:

    ids_in_use        the replica, before it notes which router a request belongs to: the id is new
    check_tokens      the engine, before it reads resumed output: version and vocabulary
    check_pooling     the engine: the model has the head that the request needs
    check_admission   the scheduler, before it queues the request: the rest; it returns the request's length limit

*Resumed output* is output that a request arrives with, because its stream began on a worker that was lost.
"""

import logging
from collections import Counter
from collections.abc import Container, Sequence

from transom_core.contract import CONTRACT_VERSION, Pooling, Request, check_kv_policy, max_prompt_len, max_stream_len
from transom_core.contract.request import MAX_CLIENT_CHARS, MAX_CLIENT_WEIGHT, MIN_CLIENT_WEIGHT
from transom_core.errors import ConfigError, PromptTooLong, RequestError, RequestTooLarge, WorkerLost
from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.policy_retentions import PolicyRetentions

logger = logging.getLogger("transom.worker")


def ids_in_use(requests: Sequence[Request], in_use: Container[str]) -> list[RequestError | None]:
    """Return, for each of these requests, an error if its id is `in_use` or another one of them has the same id, else None."""
    counts = Counter(request.request_id for request in requests)
    taken = {one for one, count in counts.items() if count > 1 or one in in_use}
    return [
        RequestError(f"Request id {request.request_id!r} is already in use; ids must be unique.", param="request_id")
        if request.request_id in taken
        else None
        for request in requests
    ]


def check_tokens(request: Request, *, vocab_size: int) -> None:
    """Check the contract's version and the token ids of a request.

    Raises:
        RequestError: a token id is outside the vocabulary.
        WorkerLost: the request has another contract version, as during an upgrade; the router sends it to another worker.
    """
    if request.version != CONTRACT_VERSION:
        raise WorkerLost(
            f"The request has contract version {request.version}; this worker speaks {CONTRACT_VERSION}. Update the older side."
        )
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("resumed_output_ids", request.resumed_output_ids),
        ("logit_bias", tuple(request.params.logit_bias)),
        ("stop_token_ids", request.params.stop_token_ids),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise RequestError(f"Token id {wrong} is outside the vocabulary (0 to {vocab_size - 1}).", param=name)


def check_pooling(pooling: Pooling | None, *, num_labels: int) -> None:
    """Raise RequestError if a request for a score has no model with a head of one label, or one for text has a classifier; a model
    that writes text has 0 labels."""
    if pooling == "score" and num_labels != 1:
        found = f"a head of {num_labels} labels" if num_labels else "no classification head"
        raise RequestError(
            f"This model has {found}. Scores need a checkpoint whose config.json says ...ForSequenceClassification with one label, "
            "over any family that is served. Qwen3-Reranker as published (Qwen3ForCausalLM, which answers yes or no) must be "
            "converted to one: Qwen3ForSequenceClassification, score.weight = lm_head of yes - lm_head of no.",
            param="model",
        )
    if pooling is None and num_labels:
        raise RequestError(
            "This model is a classifier: it writes no text. Use /v1/rerank, /v1/score or /v1/embeddings.", param="model"
        )


def check_admission(
    request: Request,
    cache: KvCache,
    *,
    in_use: Container[str],
    policy_retentions: PolicyRetentions,
    max_model_len: int,
    kv_policy_obstacle: str,
) -> int:
    """Check a request, and return the most tokens, prompt and output together, that it may reach.

    `in_use` has the ids of the scheduler's requests; `policy_retentions` says which blocks the request keeps by its KV policy;
    `kv_policy_obstacle` says why the model cannot follow a KV policy, and is empty if it can.

    Raises:
        RequestError: the prompt is empty, the resumed output is complete already, the id is in use, the client's name is too long
            or its weight out of range, or the KV policy does not suit the model.
        PromptTooLong, RequestTooLarge: see `_length_limit`.
    """
    if not request.prompt_token_ids:
        raise RequestError("The prompt is empty; give at least one token.", param="prompt")
    num_resumed, max_tokens = len(request.resumed_output_ids), request.params.max_tokens
    if max_tokens is not None and num_resumed >= max_tokens:
        raise RequestError(
            f"resumed_output_ids has {num_resumed} tokens and max_tokens is {max_tokens}; nothing is left to generate.",
            param="resumed_output_ids",
        )
    if not MIN_CLIENT_WEIGHT <= request.client_weight <= MAX_CLIENT_WEIGHT:  # a NaN is refused, too
        raise RequestError(
            f"client_weight is {request.client_weight}; give one from {MIN_CLIENT_WEIGHT} to {MAX_CLIENT_WEIGHT}.",
            param="client_weight",
        )
    if len(request.client) > MAX_CLIENT_CHARS:
        raise RequestError(
            f"client has {len(request.client)} characters; {MAX_CLIENT_CHARS} are allowed.", param="client"
        )
    if request.request_id in in_use:
        raise RequestError(f"request_id {request.request_id!r} is already being served.", param="request_id")
    check_kv_policy(
        request.kv_policy,
        kv_quality=request.kv_quality,
        block_size=cache.block_size,
        max_model_len=max_model_len,
        obstacle=kv_policy_obstacle,
    )
    stream_len = stream_limit(request, max_model_len)
    longest_prompt = max_prompt_len(stream_len, max_model_len)
    if longest_prompt < min(stream_len, request.num_prompt_tokens):
        raise PromptTooLong(
            f"The prompt has {request.num_prompt_tokens} tokens; with this KV policy it may have {longest_prompt}.",
            param="prompt",
        )
    # A request that is compared with full attention keeps all its blocks.
    kept = cache.retentions if request.kv_quality else policy_retentions.of(request.kv_policy)
    return _length_limit(request, cache, max_model_len=stream_len, retentions=kept)


def stream_limit(request: Request, max_model_len: int) -> int:
    """Return the most tokens, prompt and output together, that the model allows the request.

    With some KV policies that is more than `max_model_len`.
    """
    return max_stream_len(
        request.kv_policy,
        kv_quality=request.kv_quality,
        max_tokens=request.params.max_tokens,
        max_model_len=max_model_len,
    )


def _length_limit(request: Request, cache: KvCache, *, max_model_len: int, retentions: RetentionSet) -> int:
    """Return the most tokens, prompt and output together, that the request may reach. `retentions` says which blocks it keeps.

    Raises:
        PromptTooLong: `max_model_len` leaves no room for one more token.
        RequestTooLarge: the KV pool could not hold that many tokens, even with nothing else running.
    """
    num_prompt, num_resumed = request.num_prompt_tokens, len(request.resumed_output_ids)
    if num_prompt + num_resumed + 1 > max_model_len:
        resumed = f" and {num_resumed} resumed output tokens" if num_resumed else ""
        raise PromptTooLong(
            f"The prompt has {num_prompt} tokens{resumed}; with at least one more to generate the model's length is "
            f"{max_model_len} tokens. Send at most {max_model_len - 1 - num_resumed}.",
            param="prompt",
        )
    max_tokens = request.params.max_tokens
    limit = max_model_len if max_tokens is None else min(num_prompt + max_tokens, max_model_len)
    pages = cache.capacity.worst_case_pages(limit, retentions)
    if pages > cache.arena.num_pages:
        raise RequestTooLarge(
            f"The request may need {pages} pages of KV cache for {limit} tokens ({num_prompt} prompt, up to "
            f"{limit - num_prompt} output); the pool has {cache.arena.num_pages}, enough for "
            f"{cache.capacity.longest_tokens(limit, retentions)} tokens. Lower max_tokens, shorten the prompt or enlarge the "
            "KV pool.",
            param="max_tokens"
            if cache.capacity.worst_case_pages(num_prompt + num_resumed + 1, retentions) <= cache.arena.num_pages
            else "prompt",
        )
    return limit


def fit_model_len(capacity_tokens: int, max_model_len: int, *, is_requested: bool) -> int:
    """Return the model length to use: `max_model_len`, or less if the KV pool holds only `capacity_tokens` of one sequence.

    Raises:
        ConfigError: the user has requested the length (`is_requested`) and the pool is too small for it.
    """
    if capacity_tokens >= max_model_len:
        return max_model_len
    if is_requested or capacity_tokens < 2:
        raise ConfigError(
            f"The KV pool holds {capacity_tokens} tokens of one sequence, and the model's length is {max_model_len}; "
            f"give a larger --kv-cache-memory-bytes, or --max-model-len {max(2, capacity_tokens)} at most."
        )
    logger.warning("The KV pool holds %d tokens of one sequence: that is the length limit now.", capacity_tokens)
    return capacity_tokens
