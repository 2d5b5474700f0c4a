"""Translates KV policies into what the cache must keep: `PolicyRetentions`, and `BoundedRetention` for policies that depend on
attention.

A *KV policy* is a request's own rule for which keys and values its full-attention layers keep. A *retention* says which blocks of a
KV cache group a sequence keeps. A `window` policy is a sliding window with sinks over the cache's full group. Policies that depend
on a sequence's attention (`attention_history`) decide while it runs which blocks stay, up to a bound: the scheduler applies the
policy and removes the other blocks (`KvCache.remove`).
"""

from functools import lru_cache

from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, WindowPolicy
from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.retention_set import RetentionSet

MAX_REMEMBERED = 64  # policies, each under 1 KB; bounded because clients may send any number of different ones


class PolicyRetentions:
    """Makes the retentions for a policy, and remembers those that were used last.

    `plain` are the retentions of the cache's own groups, which must all be full groups if a policy is given.
    """

    def __init__(self, plain: RetentionSet, *, block_size: int) -> None:
        self._plain, self._block_size = plain, block_size
        self._under = lru_cache(MAX_REMEMBERED)(self._make)

    def of(self, policy: KvPolicy | None) -> RetentionSet:
        """Return the retentions of sequences with this policy; None: those of the cache's own groups."""
        return self._plain if policy is None else self._under(policy)

    def _make(self, policy: KvPolicy) -> RetentionSet:
        return RetentionSet.of(
            (retention_under(policy, retention.spec) for retention in self._plain), block_size=self._block_size
        )


class BoundedRetention(Retention):
    """A full group of which a sequence holds at most `max_blocks` blocks at once, the first `num_sink_blocks` always.

    No block is freed because of its position alone, so for the cache the group keeps every token; only admission counts with the
    bound. Blocks of such a sequence are never published.
    """

    def __init__(self, spec: GroupSpec, *, num_sink_blocks: int, max_blocks: int) -> None:
        super().__init__(spec)
        self.num_sink_blocks = num_sink_blocks
        self.max_blocks = max_blocks

    def first_live_block(self, n: int) -> int:
        """Return the run's first block: the one after the sink blocks, which only the policy may remove."""
        return self.num_sink_blocks

    def allocated_blocks(self, n: int, *, lag: int = 0) -> int:
        """Return the most blocks that a sequence may hold while token `n` is computed."""
        return min(n // self.block_size + 1, self.max_blocks)

    def peak_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens may hold at once."""
        return min(max(0, num_tokens - 1) // self.block_size + 1, self.max_blocks)


def retention_under(policy: KvPolicy, full: GroupSpec) -> Retention:
    """Return what a sequence with this policy keeps of a full group."""
    if isinstance(policy, WindowPolicy):
        return Retention(full.with_window(sinks=policy.sinks, window=policy.window))
    return BoundedRetention(
        full, num_sink_blocks=-(-policy.sinks // full.block_size), max_blocks=max_blocks(policy, full.block_size)
    )


def max_blocks(policy: AdaptivePolicy | HeavyPolicy, block_size: int) -> int:
    """Return the most blocks that a sequence holds at once, sink blocks included."""
    match policy:
        case AdaptivePolicy():
            return -(-policy.sinks // block_size) + policy.max_window // block_size
        case HeavyPolicy():
            return policy.budget // block_size
