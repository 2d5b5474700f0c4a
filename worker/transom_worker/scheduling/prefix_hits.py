"""What a sequence finds in the prefix cache when it is admitted: `find_hit` searches, `count_outcome` counts the tokens found, and
`checkpoint_boundaries` chooses where later requests will probably continue.

hit         the cached prefix of a sequence's tokens, which need no computing
checkpoint  a boundary of a prompt at which the cache keeps what a later request needs to continue there
"""

from collections.abc import Mapping

from transom_core.kv_cache.hashing import extend_chain
from transom_core.kv_cache.prefix_search import PrefixHit
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.scheduling.sequence import CachedPrompt, Sequence


def find_hit(cache: KvCache, sequence: Sequence) -> PrefixHit | None:
    """Search the prefix cache for the sequence's known tokens; None if the sequence does not read the prefix cache.

    A sequence that only writes the cache needs the chain of its digests too, so the chain is extended in either case.
    """
    policy = sequence.request.kv_policy
    if not cache.enable_prefix_caching or (policy is not None and policy.depends_on_history):
        return None  # a sequence whose KV depends on its attention history publishes nothing, so it needs no digests
    extend_chain(sequence.chain, sequence.root, sequence.token_ids, cache.block_size)
    if not sequence.reads_prefix_cache:
        return None
    return cache.find(sequence.chain, len(sequence.token_ids), sequence.retentions)


def count_outcome(
    cache: KvCache, sequence: Sequence, hit: PrefixHit | None, *, index_version: int
) -> Mapping[str, int]:
    """Return the sequence's tokens by outcome of the hit search: "hit", "repaired", or "missed_<reason>" (`prefix_outcome`).

    At the first admission the result has the prompt's tokens, and they are added to the cache's statistics. At a later one
    it has only the hit and repaired tokens: they say how much of what the preemption released was still cached.
    """
    if sequence.was_admitted:
        if hit is None:
            return {}
        return {"hit": hit.start, "repaired": hit.num_hash_blocks * cache.block_size - hit.start}
    num_prompt = sequence.num_prompt_tokens
    start, device_start = (0, 0) if hit is None else (min(hit.start, num_prompt), min(hit.device_start, num_prompt))
    sequence.cached_prompt = CachedPrompt(start, start - device_start, index_version)
    return cache.outcomes.count(hit, sequence.chain, num_tokens=len(sequence.token_ids), num_prompt_tokens=num_prompt)


def checkpoint_boundaries(
    sequence: Sequence, hit: PrefixHit | None, *, block_size: int
) -> list[tuple[int, CheckpointKind]]:
    """Return where to place checkpoints after the hit, as (boundary in hash blocks, kind).

    Later requests are expected to continue from the end of the system prompt, from the ends of the last two turns, from the
    end of the prompt, and where the client says so. Example with hash blocks of 16 tokens: turns that end at tokens 40, 100 and
    200 and a prompt of 250 tokens give boundaries 2 (system), 6 and 12 (turns) and 15 (prompt). A client's mark at token 70
    gives boundary 4 (turn); one inside the system prompt has the kind SYSTEM.
    """
    turns, marks = sequence.request.turn_boundaries, sequence.request.cache_marks
    # If two ends fall into the same hash block, the later assignment wins: PROMPT over TURN over SYSTEM.
    boundaries = {turns[0] // block_size: CheckpointKind.SYSTEM} if turns else {}
    for mark in marks:
        is_system = bool(turns) and mark <= turns[0]
        boundaries[mark // block_size] = CheckpointKind.SYSTEM if is_system else CheckpointKind.TURN
    boundaries |= {end // block_size: CheckpointKind.TURN for end in turns[1:][-2:]}
    boundaries[(len(sequence.token_ids) - 1) // block_size] = CheckpointKind.PROMPT
    begin = hit.num_hash_blocks if hit else 0
    return sorted((boundary, kind) for boundary, kind in boundaries.items() if boundary > begin)
