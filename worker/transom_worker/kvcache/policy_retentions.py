"""`PolicyRetentions`: what sequences with a KV policy keep, as the cache needs it.

A *KV policy* is a request's own rule for what its full-attention layers keep. A `window` is a sliding window with sinks over
the cache's full group; policies that depend on a sequence's attention (`attention_history`) keep blocks up to a bound.
"""

from __future__ import annotations

from collections import OrderedDict

from transom_core.contract import AdaptivePolicy, HeavyPolicy, KvPolicy, WindowPolicy
from transom_core.kv_cache.groups import GroupSpec
from transom_core.kv_cache.retention import Retention
from transom_core.kv_cache.retention_set import RetentionSet
from transom_worker.kvcache.bounded_retention import BoundedRetention

MAX_REMEMBERED = 64  # policies: a retention has tables, and clients may send any number of policies


class PolicyRetentions:
    """Makes retentions by policy, and remembers those that were used last. `plain` are those of the cache's own groups, which must
    be full groups alone if a policy is asked for.
    """

    def __init__(self, plain: RetentionSet, *, block_size: int) -> None:
        self._plain, self._block_size = plain, block_size
        self._by_policy: OrderedDict[KvPolicy, RetentionSet] = OrderedDict()

    def of(self, policy: KvPolicy | None) -> RetentionSet:
        """Return the retentions of sequences with this policy; None: those of the cache's own groups."""
        if policy is None:
            return self._plain
        found = self._by_policy.pop(policy, None) or self._make(policy)
        self._by_policy[policy] = found
        if len(self._by_policy) > MAX_REMEMBERED:
            self._by_policy.popitem(last=False)
        return found

    def _make(self, policy: KvPolicy) -> RetentionSet:
        return RetentionSet.of(
            (retention_under(policy, retention.spec) for retention in self._plain), block_size=self._block_size
        )


def retention_under(policy: KvPolicy, full: GroupSpec) -> Retention:
    """Return what a sequence with this policy keeps of a full group."""
    if isinstance(policy, WindowPolicy):
        return Retention(full.with_window(sinks=policy.sinks, window=policy.window))
    return BoundedRetention(
        full,
        num_sink_blocks=-(-policy.sinks // full.block_size),
        max_blocks=max_blocks(policy, full.block_size),
    )


def max_blocks(policy: AdaptivePolicy | HeavyPolicy, block_size: int) -> int:
    """Return the most blocks that a sequence holds at once, sink blocks included."""
    match policy:
        case AdaptivePolicy():
            return -(-policy.sinks // block_size) + policy.max_window // block_size
        case HeavyPolicy():
            return policy.budget // block_size
