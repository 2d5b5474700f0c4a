"""Why prompt tokens hit or missed the prefix cache; the parts always sum to the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from transom_worker.kvcache.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix_search import PrefixHit

HIT = "hit"
REPAIRED = "repaired"
MISSED = "missed"
NEVER_SEEN = "missed_never_seen"
FULL_EVICTED = "missed_full_evicted"
WINDOW_EVICTED = "missed_window_evicted"
BELOW_ALIGNMENT = "missed_below_alignment"
LAST_TOKEN = "missed_last_token"
POLICY = "missed_policy"


class OutcomeCounts:
    """What became of admitted requests' tokens, since start: prompt tokens and requests by outcome, and repairs."""

    def __init__(self, index: PrefixIndex, *, block_size: int) -> None:
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.num_repairs = 0
        self.repair_tokens = 0
        self._index = index
        self._block_size = block_size

    def count(
        self, hit: PrefixHit | None, chain: Sequence[bytes], *, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, int]:
        """Count a request's prompt tokens once, at its first admission; returns them by outcome. `hit` None: it reads no cache by
        policy."""
        tokens = {POLICY: num_prompt_tokens}
        if hit is not None:
            tokens = classify(
                hit,
                chain,
                self._index,
                num_tokens=num_tokens,
                num_prompt_tokens=num_prompt_tokens,
                block_size=self._block_size,
            )
        self.tokens.update(tokens)
        self.requests[of_request(tokens)] += 1
        return tokens

    def count_repair(self, num_tokens: int) -> None:
        """A sequence is admitted that replays so many tokens; after a preemption as well."""
        self.num_repairs += 1
        self.repair_tokens += num_tokens


def classify(
    hit: PrefixHit,
    digests: Sequence[bytes],
    index: PrefixIndex,
    *,
    num_tokens: int,
    num_prompt_tokens: int,
    block_size: int,
) -> dict[str, int]:
    """Prompt tokens by outcome for a search over `num_tokens` known tokens (prompt and resumed output).

    `[0, start)` hit, `[start, n)` repaired; then window_evicted while full groups reach, full_evicted while the chain was ever
    seen, never_seen; behind the last boundary allowed lie tokens that fill no unit (below_alignment), or one whole unit
    (last_token).
    """
    seen_end = hit.num_hash_blocks + index.num_seen(digests, hit.num_hash_blocks, hit.limit)
    window_end = max(hit.num_hash_blocks, min(hit.full_groups_reach, seen_end))
    tail = LAST_TOKEN if num_tokens % block_size == 0 else BELOW_ALIGNMENT
    ends = (
        (HIT, hit.start),
        (REPAIRED, hit.num_hash_blocks * block_size),
        (WINDOW_EVICTED, window_end * block_size),
        (FULL_EVICTED, seen_end * block_size),
        (NEVER_SEEN, hit.limit * block_size),
        (tail, num_tokens),
    )
    outcome: dict[str, int] = {}
    begin = 0
    for reason, end in ends:
        end = min(end, num_prompt_tokens)
        if end > begin:
            outcome[reason] = outcome.get(reason, 0) + end - begin
            begin = end
    return outcome


def of_request(tokens: dict[str, int]) -> str:
    """A request's outcome by its tokens': repaired where a window had to be, hit where anything was found, else missed."""
    return REPAIRED if REPAIRED in tokens else HIT if HIT in tokens else MISSED
