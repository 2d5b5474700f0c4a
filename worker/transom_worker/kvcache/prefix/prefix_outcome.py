"""Counts prompt tokens by outcome: why they hit or missed the prefix cache. The outcomes always add up to the prompt's length.

    hash block     `--block-size` tokens, which are cached and searched together
    full groups    KV cache groups that keep every token; the others, *sliding groups*, keep a *window* of the last ones
    window repair  computing the tokens before the end of a hit again, so that sliding groups get the windows that they lack there

The hit search (`prefix_search`) divides a prompt into consecutive ranges. Example with hash blocks of 16 tokens, a prompt of 200
tokens, and a hit of 64 tokens, 16 of which are repaired:

    0        48         64             96           128          192      200
    |  hit   | repaired |window_evicted|full_evicted| never_seen |  tail  |

    hit                cached in every group; not computed
    repaired           cached in the full groups, computed again for sliding groups
    window_evicted     cached in the full groups; the windows were evicted
    state_not_kept     instead of window_evicted, in models with recurrent layers: no snapshot of their state is cached at the end
    full_evicted       was cached once, and was evicted from the full groups too
    never_seen         was never cached, or was evicted so long ago that the index does not remember it
    below_alignment    the tail, if it is shorter than a hash block
    last_token         the tail, if it is a whole hash block: the last token must be computed, so its block cannot be hit
    policy             the whole prompt of a request that does not read the cache (`Request.reads_prefix_cache`)

All but the first two are reported as `missed_<outcome>`.
"""

from collections import Counter
from collections.abc import Sequence

from transom_core.kv_cache.prefix_search import PrefixHit
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex

HIT = "hit"
REPAIRED = "repaired"
MISSED = "missed"
NEVER_SEEN = "missed_never_seen"
FULL_EVICTED = "missed_full_evicted"
WINDOW_EVICTED = "missed_window_evicted"
STATE_NOT_KEPT = "missed_state_not_kept"
BELOW_ALIGNMENT = "missed_below_alignment"
LAST_TOKEN = "missed_last_token"
POLICY = "missed_policy"


class OutcomeCounts:
    """Counts since start: prompt tokens by outcome, admitted requests, and window repairs.

    A request counts as repaired if any of its tokens was repaired, else as hit if any of its tokens was a hit, else as missed.
    """

    def __init__(self, index: PrefixIndex, *, block_size: int, keeps_states: bool) -> None:
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.host_tokens = 0  # prompt tokens that were hits only because the host tier had their blocks
        self.num_repairs = 0
        self.repair_tokens = 0
        self._index = index
        self._block_size = block_size
        self._keeps_states = keeps_states

    def count(
        self, hit: PrefixHit | None, chain: Sequence[bytes], *, num_tokens: int, num_prompt_tokens: int
    ) -> dict[str, int]:
        """Count a request's prompt tokens at its first admission, and return them by outcome. `hit` is None if the request does not
        read the cache."""
        tokens = {POLICY: num_prompt_tokens}
        if hit is not None:
            tokens = classify(
                hit,
                chain,
                self._index,
                num_tokens=num_tokens,
                num_prompt_tokens=num_prompt_tokens,
                block_size=self._block_size,
                keeps_states=self._keeps_states,
            )
            self.host_tokens += min(hit.start, num_prompt_tokens) - min(hit.device_start, num_prompt_tokens)
        self.tokens.update(tokens)
        self.requests[REPAIRED if REPAIRED in tokens else HIT if HIT in tokens else MISSED] += 1
        return tokens

    def count_repair(self, num_tokens: int) -> None:
        """Count an admission, the first or a later one, with a window repair of `num_tokens` tokens."""
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
    keeps_states: bool = False,
) -> dict[str, int]:
    """Return the number of prompt tokens for each outcome, after a search over `num_tokens` known tokens.

    The known tokens are the prompt and, for a request that migrated, the output it arrived with. The module's docstring explains
    the outcomes. `digests` is the chain of hash blocks, `index` the prefix index that was searched.
    """
    # Ends of ranges, in hash blocks; `max` and `min` keep them in ascending order.
    seen_end = hit.num_hash_blocks + index.num_seen(digests, hit.num_hash_blocks, hit.limit)
    window_end = max(hit.num_hash_blocks, min(hit.full_groups_reach, seen_end))
    tail = LAST_TOKEN if num_tokens % block_size == 0 else BELOW_ALIGNMENT
    ends = (
        (HIT, hit.start),
        (REPAIRED, hit.num_hash_blocks * block_size),
        (STATE_NOT_KEPT if keeps_states else WINDOW_EVICTED, window_end * block_size),
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
