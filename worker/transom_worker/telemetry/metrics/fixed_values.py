"""Label values that are known beforehand: their series are there, at 0, before the first event, so that rates work."""

from __future__ import annotations

from collections.abc import Iterable

FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("overloaded", "worker_unavailable", "request_refused", "internal_error")
PREEMPTION_MODES = ("recompute",)
HIT_OUTCOMES = ("hit", "repaired", "missed")
MISS_REASONS = ("never_seen", "full_evicted", "window_evicted", "below_alignment", "last_token", "policy")
EVICTION_REASONS = ("own_group", "other_group", "compaction", "reset")
CHECKPOINT_KINDS = ("system", "turn", "prompt", "generation", "fork", "preempted")


def with_zeros(values: Iterable[str], counts: dict[str, int]) -> dict[str, int]:
    """Counts by label value, with 0 for those that are missing."""
    return dict.fromkeys(values, 0) | counts
