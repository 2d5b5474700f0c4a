"""Metric families of the KV cache: pages, blocks by group and state, checkpoints, and prefix hits.

- **group**: the layers that keep the KV of the same tokens; each group has blocks of its own size.
- **page**: a piece of the KV pool that one group leases at a time and divides into blocks.
- **checkpoint**: a position of a cached prefix from which a request can continue, with the blocks of every group for it.
- **window repair**: computing the last tokens of a hit again, because its sliding-window blocks were evicted.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

from transom_core.telemetry.own_labels import OwnLabels, crossed
from transom_worker.kvcache.stats import CacheStats, CheckpointStats, GroupStats

# Label values that are known in advance. Their series exist, at 0, before the first event, because a rate needs the value before
# it.
HIT_OUTCOMES = ("hit", "repaired", "missed")
MISS_REASONS = (
    "never_seen", "full_evicted", "window_evicted", "state_not_kept", "below_alignment", "last_token", "policy",
)  # fmt: skip
EVICTION_REASONS = ("own_group", "other_group", "compaction", "reset")
HOST_MOVES = ("spilled", "swapped", "imported", "loaded")  # counts of `HostGroupStats`
HOST_EVICTION_REASONS = ("own_group", "other_group", "reset")
CHECKPOINT_KINDS = ("system", "turn", "prompt", "generation", "fork", "preempted")


def cache_families(own: OwnLabels, stats: CacheStats) -> Iterator[Metric]:
    """Yield every metric family of the KV cache."""
    yield from _prefixes(own, stats)
    yield from _arena(own, stats)
    yield from _checkpoints(own, stats.checkpoints)
    yield from _blocks(own, stats)
    yield from _times(own, stats)
    yield from _host(own, stats)


def _prefixes(own: OwnLabels, stats: CacheStats) -> Iterator[Metric]:
    fixed = ("hit", "repaired", *(f"missed_{reason}" for reason in MISS_REASONS))
    yield own.counter(  # read at the same moment as the outcomes, which must sum to it on every page
        "transom_prompt_tokens", "Prompt tokens of admitted requests.", sum(stats.outcome_tokens.values())
    )
    yield own.counters(
        "transom_prefix_tokens",
        "Prompt tokens of admitted requests: hit, repaired (computed again to restore a window) or missed for a "
        "reason.",
        ("outcome", "reason"),
        [(_outcome(name), tokens) for name, tokens in _with_zeros(fixed, stats.outcome_tokens).items()],
    )
    yield own.counters(
        "transom_prefix_requests",
        "Admitted requests: repaired where a window was restored, else hit where anything was found, else missed.",
        ("outcome",),
        [((name,), count) for name, count in _with_zeros(HIT_OUTCOMES, stats.outcome_requests).items()],
    )
    yield own.counter(
        "transom_prefix_host_tokens",
        "Hit prompt tokens that would have been computed without the host tier.",
        stats.host_tokens,
    )
    yield own.counter(
        "transom_kv_repairs", "Window repairs begun, those after a preemption included.", stats.num_repairs
    )
    yield own.counter("transom_kv_repair_tokens", "Tokens that window repairs compute again.", stats.repair_tokens)


def _outcome(name: str) -> tuple[str, str]:
    outcome, _, reason = name.partition("_")
    return outcome, reason


def _arena(own: OwnLabels, stats: CacheStats) -> Iterator[Metric]:
    leased = stats.num_pages - stats.free_pages
    yield own.gauges(
        "transom_kv_pages",
        "Pages of the KV pool: free, or leased to a group.",
        ("state",),
        [(("free",), stats.free_pages), (("leased",), leased)],
    )
    yield own.gauge("transom_kv_pool_bytes", "Bytes of the KV pool on the first rank.", stats.pool_bytes)
    yield own.gauge(
        "transom_kv_fragmentation_ratio",
        "Share of the leased pages' bytes that lies in empty blocks.",
        stats.fragmentation,
    )
    yield own.gauge(
        "transom_kv_waste_ratio", "Share of a page that no block covers, for the group that fits worst.", stats.waste
    )
    yield own.counter(
        "transom_kv_compacted_blocks", "Blocks moved to let an allocation succeed.", stats.num_compacted_blocks
    )


def _checkpoints(own: OwnLabels, stats: CheckpointStats) -> Iterator[Metric]:
    yield own.gauges(
        "transom_kv_checkpoints",
        "Checkpoints in the prefix cache (positions that a request can continue from), by what they were placed for.",
        ("kind",),
        [((kind,), count) for kind, count in _with_zeros(CHECKPOINT_KINDS, stats.current).items()],
    )
    changes = (
        ("placed", stats.placed),
        ("given_up", stats.evicted),
        ("windows_given_up", stats.windows_evicted),
        ("hit", stats.hit),
    )
    yield own.counters(
        "transom_kv_checkpoint_changes",
        "Changes of checkpoints: placed, given_up (evicted), windows_given_up (only its window blocks are evicted), "
        "hit (a request continued from it).",
        ("kind", "change"),
        [
            ((kind, change), count)
            for change, counts in changes
            for kind, count in _with_zeros(CHECKPOINT_KINDS, counts).items()
        ],
    )


def _blocks(own: OwnLabels, stats: CacheStats) -> Iterator[Metric]:
    groups, pool_bytes = stats.groups, max(1, stats.pool_bytes)
    states = [(group, state, count) for group in groups for state, count in _states(group)]
    yield own.gauges(
        "transom_kv_blocks",
        "KV blocks: active (in use), cached (can be hit) or empty (in a page that the group has leased).",
        ("group", "state"),
        [((group.name, state), count) for group, state, count in states],
    )
    yield own.gauges(
        "transom_kv_bytes",
        "Bytes of KV blocks on the first rank.",
        ("group", "state"),
        [((group.name, state), count * group.block_bytes) for group, state, count in states],
    )
    yield own.gauges(
        "transom_kv_held_blocks",
        "Cached blocks that a checkpoint pins; the others are evicted first.",
        ("group",),
        [((group.name,), group.pinned_blocks) for group in groups],
    )
    yield own.gauges(
        "transom_kv_utilization_ratio",
        "Share of the whole pool's bytes that lies in a group's active blocks.",
        ("group",),
        [((group.name,), group.active_blocks * group.block_bytes / pool_bytes) for group in groups],
    )
    yield own.counters(
        "transom_kv_evicted_blocks",
        "Cached blocks that were evicted, by what needed the memory: own_group, other_group, compaction, or reset.",
        ("group", "reason"),
        crossed({group.name: _with_zeros(EVICTION_REASONS, group.evicted_blocks) for group in groups}),
    )


def _states(group: GroupStats) -> tuple[tuple[str, int], ...]:
    return (("active", group.active_blocks), ("cached", group.cached_blocks), ("empty", group.free_blocks))


def _times(own: OwnLabels, stats: CacheStats) -> Iterator[Metric]:
    yield own.histograms(
        "transom_kv_residency_seconds",
        "Seconds from when a block became cached to its eviction.",
        ("group",),
        [((group.name,), group.residency) for group in stats.groups],
    )
    yield own.histograms(
        "transom_kv_reuse_interval_seconds",
        "Seconds from when a block became cached to its hit.",
        ("group",),
        [((group.name,), group.reuse_interval) for group in stats.groups],
    )


def _host(own: OwnLabels, stats: CacheStats) -> Iterator[Metric]:
    """Yield the families of the host tier; all values are 0 without one."""
    groups = stats.host_groups
    yield own.gauges(
        "transom_kv_host_pages",
        "Pages of the host tier: free, or leased to a group.",
        ("state",),
        [(("free",), stats.host_free_pages), (("leased",), stats.host_pages - stats.host_free_pages)],
    )
    yield own.gauges(
        "transom_kv_host_blocks",
        "Blocks in the host tier: cached (can be hit), other (of swapped requests and imports) or empty (in a page "
        "that the group has leased).",
        ("group", "state"),
        crossed(
            {
                group.name: {"cached": group.cached_blocks, "other": group.other_blocks, "empty": group.free_blocks}
                for group in groups
            }
        ),
    )
    yield own.gauges(
        "transom_kv_host_import_blocks",
        "Blocks of the host tier that came from other workers or the disk, until their requests are admitted.",
        ("group",),
        [((group.name,), group.held_blocks) for group in groups],
    )
    yield own.counters(
        "transom_kv_host_moved_blocks",
        "Blocks that moved to and from the host tier: spilled (evicted from the device), swapped (of preempted "
        "requests), imported (from other workers or the disk) or loaded (back).",
        ("group", "move"),
        [((group.name, move), getattr(group, f"{move}_blocks")) for group in groups for move in HOST_MOVES],
    )
    yield own.counters(
        "transom_kv_host_evicted_blocks",
        "Blocks that were evicted from the host tier, by what needed the memory: own_group, other_group, or reset.",
        ("group", "reason"),
        crossed({group.name: _with_zeros(HOST_EVICTION_REASONS, group.evicted_blocks) for group in groups}),
    )


def _with_zeros(values: Iterable[str], counts: dict[str, int]) -> dict[str, int]:
    """Return counts by label value, with 0 for each of `values` that has no count."""
    return dict.fromkeys(values, 0) | counts
