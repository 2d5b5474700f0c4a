"""Label values that are known in advance. Their series exist, at 0, before the first event: a rate needs the value before it."""

from __future__ import annotations

from collections.abc import Iterable

FINISH_REASONS = ("stop", "length", "abort", "error", "handover")
REFUSALS = ("overloaded", "worker_unavailable", "request_refused", "internal_error")
HIT_OUTCOMES = ("hit", "repaired", "missed")
MISS_REASONS = ("never_seen", "full_evicted", "window_evicted", "below_alignment", "last_token", "policy")
EVICTION_REASONS = ("own_group", "other_group", "compaction", "reset")
HOST_EVICTION_REASONS = ("own_group", "other_group", "reset")
CHECKPOINT_KINDS = ("system", "turn", "prompt", "generation", "fork", "preempted")


def with_zeros(values: Iterable[str], counts: dict[str, int]) -> dict[str, int]:
    """Counts by label value, with 0 for each of `values` that has no count."""
    return dict.fromkeys(values, 0) | counts
