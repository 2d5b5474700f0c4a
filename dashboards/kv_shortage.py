"""The KV cache dashboard's sections about what a lack of memory costs, and about each worker by itself."""

from __future__ import annotations

from dashboards.board import Section
from dashboards.colors import BLOCK_STATES, OUTCOMES, PHASES
from dashboards.panels import About, high_is_bad, lines
from dashboards.queries import GROUP, WORKER, Query, each_of, rate, ratio, split, total

COMPUTED = rate("transom_computed_tokens_total", WORKER)
THROWN_AWAY = ratio(rate("transom_preempted_tokens_total", f'{WORKER},mode="recompute"'), COMPUTED)
MOVED_BLOCKS = rate("transom_kv_host_moved_blocks_total", GROUP, "model", "worker", "group", "move")
BLOCK_BYTES = ratio(
    total("transom_kv_bytes", GROUP, "model", "worker", "group"),
    total("transom_kv_blocks", GROUP, "model", "worker", "group"),
)
SHORTAGE = Section(
    title="Shortage and repairs",
    panels=[
        lines(
            About(
                title="Repairs and their tokens",
                shows="Repairs begun, and tokens that they compute again, a second.",
                act="Many tokens a repair: windows are evicted long before requests return to them; add memory.",
            ),
            [
                Query(expr=rate("transom_kv_repairs_total", WORKER), legend="repairs"),
                Query(expr=rate("transom_kv_repair_tokens_total", WORKER), legend="tokens"),
            ],
            "short",
        ),
        lines(
            About(
                title="Repeated work",
                shows="Share of all computed tokens that repairs and preemptions made necessary. Dashed: 5 % and 20 %.",
                act="Recompute high: runbook of TransomCacheThrashing. Repair high: windows are evicted too soon.",
            ),
            [
                Query(
                    expr=each_of(
                        rate("transom_computed_tokens_total", f'{WORKER},phase=~"repair|recompute"', "phase"),
                        COMPUTED,
                    ),
                    legend="{{phase}}",
                )
            ],
            "percentunit",
            limits=high_is_bad(0.05, 0.2),
            colors=PHASES,
        ),
        lines(
            About(
                title="Preemptions by mode",
                shows="Requests preempted, sent back to the queue for lack of blocks, a second, by worker.",
                act="On one worker only: it has the long requests; see *Router*, in flight. On all: add memory.",
            ),
            split(rate, "transom_preemptions_total", WORKER, "worker", "mode"),
            "ops",
        ),
        lines(
            About(
                title="Host tier",
                shows="Blocks a second that moved between device and host tier: spilled (evicted from the device), swapped (of "
                "preempted requests), imported (from other workers or the disk), loaded (back to the device), and dropped.",
                act="Dropped and nothing loaded: the tier is too small for what returns; raise `--swap-space`.",
            ),
            [
                Query(expr=rate("transom_kv_host_moved_blocks_total", GROUP, "move"), legend="{{move}}"),
                Query(expr=rate("transom_kv_host_evicted_blocks_total", GROUP), legend="dropped"),
            ],
            "ops",
        ),
        lines(
            About(
                title="Host tier: bytes moved",
                shows="Bytes a second that moved between device and host tier, padding between blocks not counted.",
                act="Near what the link carries: requests wait for loads. Spilled and loaded alike for long: the runbook of "
                "TransomHostTierThrashing.",
            ),
            [
                Query(
                    expr=f"sum by (move) ({MOVED_BLOCKS} * on (model, worker, group) group_left () ({BLOCK_BYTES}))",
                    legend="{{move}}",
                )
            ],
            "Bps",
        ),
        lines(
            About(
                title="Host tier: blocks and pages",
                shows="Blocks of the host tier: cached (can be hit), other (of swapped requests and imports), empty, held by "
                "imports until their requests are admitted; its leased pages.",
                act="Other near cached: many requests are preempted; lower `--max-num-seqs` or add memory.",
            ),
            [
                Query(expr=f"sum by (group, state) (transom_kv_host_blocks{{{GROUP}}})", legend="{{group}} {{state}}"),
                Query(expr=f"sum(transom_kv_host_import_blocks{{{GROUP}}})", legend="held by imports"),
                Query(expr=f"sum(transom_kv_host_pages{{{WORKER},state='leased'}})", legend="leased pages"),
            ],
            "short",
        ),
        lines(
            About(
                title="Prompt tokens that the host tier spared",
                shows="Prompt tokens a second that were loaded from the host tier instead of being computed.",
                act="0 beside spilled blocks: nothing returns, or loading takes longer than computing.",
            ),
            [Query(expr=rate("transom_prefix_host_tokens_total", WORKER), legend="spared")],
            "short",
        ),
        lines(
            About(
                title="Tokens thrown away",
                shows="Computed tokens that preemptions threw away, over all that were computed. Dashed: 5 % and 20 %. "
                "The cache may give some of them back.",
                act="Over 5 %: the batch is larger than the pool; lower `--max-num-seqs`.",
            ),
            [Query(expr=THROWN_AWAY, legend="thrown away")],
            "percentunit",
            limits=high_is_bad(0.05, 0.2),
            width=12,
        ),
        lines(
            About(
                title="Compacted blocks",
                shows="Blocks moved to let an allocation succeed, a second, by worker.",
                act="Constant: groups compete for pages; more memory ends it.",
            ),
            split(rate, "transom_kv_compacted_blocks_total", WORKER, "worker"),
            "ops",
            width=12,
        ),
    ],
)


EACH_WORKER = Section(
    title="Worker $worker",
    repeat="worker",
    panels=[
        lines(
            About(
                title="Blocks' bytes of $worker",
                shows="Active, cached and empty bytes of this worker by group. Dashed: its pool.",
                act="Compare with the other workers: a cold one has just started, or gets no traffic.",
            ),
            [
                Query(expr=total("transom_kv_bytes", GROUP, "group", "state"), legend="{{group}} {{state}}"),
                Query(expr=total("transom_kv_pool_bytes", WORKER), legend="pool"),
            ],
            "bytes",
            stack=True,
            unstacked=["pool"],
            shades=BLOCK_STATES,
            width=16,
        ),
        lines(
            About(
                title="Outcomes at $worker",
                shows="Prompt tokens of this worker, a second: hit, repaired, missed.",
                act="Fewer hits than elsewhere: it lost its cache (a restart), or gets the requests without hits.",
            ),
            split(rate, "transom_prefix_tokens_total", WORKER, "outcome"),
            "short",
            stack=True,
            colors=OUTCOMES,
        ),
    ],
)
