"""Brute force for KV policies that depend on attention: what a sequence keeps, token by token, from its tokens alone."""

import hashlib

from tests.worker.scheduling.replay_executor import block_mass
from tests.worker.scheduling.scheduler_driver import BLOCK, Driver
from transom_core.contract import AdaptivePolicy, HeavyPolicy
from transom_worker.scheduling.attention_history import HALF_LIFE_TOKENS, interval_blocks


def kept_blocks(
    policy: AdaptivePolicy | HeavyPolicy, request_id: str, token_ids: list[int], *, num_prompt_tokens: int, block: int
) -> list[set[int]]:
    """By query: the logical blocks in the table while it is computed, its own one included."""
    digest = hashlib.sha256(policy.text.encode() + request_id.encode())
    sinks = set(range(-(-policy.sinks // block)))
    present: set[int] = set()
    scores: dict[int, float] = {}
    new: dict[int, float] = {}
    began, reads = 0, []
    for query, token in enumerate(token_ids):
        if query == next_point(policy, began, num_prompt_tokens, block):
            length, ahead = query - began, next_point(policy, query, num_prompt_tokens, block) - query
            bound = policy.budget if isinstance(policy, HeavyPolicy) else len(sinks) * block + policy.max_window
            allowed = bound // block - len(sinks) - -(-ahead // block)
            run = sorted(present - sinks)
            if isinstance(policy, HeavyPolicy):
                scores = {b: scores.get(b, 0.0) * 0.5 ** (length / HALF_LIFE_TOKENS) + new.get(b, 0.0) for b in run}
                recent = run[len(run) - min(len(run), (allowed + 1) // 2) :]
                heavy = sorted(set(run) - set(recent), key=lambda b: (-scores[b], -b))[: max(0, allowed - len(recent))]
                run = sorted([*recent, *heavy])
            else:
                least = min(allowed, max(1, -(-(policy.min_window - 1) // block)))
                for _ in range(-(-length // block) + 1):
                    if len(run) > least and new.get(run[0], 0.0) / length < policy.threshold:
                        run = run[1:]
                    else:
                        break
                run = run[max(0, len(run) - allowed) :]
            present, new, began = set(run) | (present & sinks), {}, query
        digest.update(token.to_bytes(4, "little"))
        present.add(query // block)
        reads.append(set(present))
        for b in present:
            new[b] = new.get(b, 0.0) + block_mass(digest.digest()[:8], b)
    return reads


def check_kept(driver: Driver) -> None:
    """Every query of a sequence with a history could read exactly the blocks that its tokens call for."""
    for name, queries in driver.executor.kept.items():
        item = driver.requests[name]
        policy = item.kv_policy
        assert isinstance(policy, AdaptivePolicy | HeavyPolicy)
        tokens = [*item.prompt_token_ids, *driver.tokens[name]]
        expected = kept_blocks(policy, name, tokens, num_prompt_tokens=item.num_prompt_tokens, block=BLOCK)
        for query, blocks in queries.items():
            if query < len(tokens):  # a token that was in flight when the request ended is not known
                upto = {block for block in blocks if block * BLOCK <= query}
                assert upto == expected[query], (name, query)


def next_point(policy: AdaptivePolicy | HeavyPolicy, position: int, num_prompt_tokens: int, block: int) -> int:
    """The first position after this one at which blocks may leave."""
    interval = interval_blocks(policy, block) * block
    return next(
        point
        for point in range(position + 1, position + num_prompt_tokens + interval + 2 * block + 1)
        if (point <= num_prompt_tokens and point % interval == 0) or (point > num_prompt_tokens and point % block == 0)
    )
