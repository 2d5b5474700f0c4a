"""The KV cache dashboard's section about what a lack of memory costs."""

from dashboards.colors import PHASES
from dashboards.panels import high_is_bad, lines
from dashboards.queries import GROUP, WORKER, each_of, rate, ratio, split

COMPUTED = rate("transom_computed_tokens_total", WORKER)
AGAIN = rate("transom_computed_tokens_total", f'{WORKER},phase=~"repair|recompute"', "phase")
THROWN_AWAY = ratio(rate("transom_preempted_tokens_total", f'{WORKER},mode="recompute"'), COMPUTED)
SHORTAGE = [
    lines(
        "Repairs and their tokens",
        {"repairs": rate("transom_kv_repairs_total", WORKER), "tokens": rate("transom_kv_repair_tokens_total", WORKER)},
        "short",
        shows="Repairs begun, and tokens that they compute again, a second.",
        act="A repair is exact, and cheaper than a miss. Many tokens a repair: "
        "windows are evicted long before requests return to them; add memory.",
    ),
    lines(
        "Repeated work",
        {"{{phase}}": each_of(AGAIN, COMPUTED)},
        "percentunit",
        shows="Share of all computed tokens that repairs and preemptions made necessary. Dashed: 5 % and 20 %.",
        act="Recompute high: runbook of TransomCacheThrashing. Repair high: windows are evicted too soon.",
        limits=high_is_bad(0.05, 0.2),
        colors=PHASES,
    ),
    lines(
        "Preemptions by mode",
        split(rate, "transom_preemptions_total", WORKER, "worker", "mode"),
        "ops",
        shows="Requests preempted, sent back to the queue for lack of blocks, a second, by worker.",
        act="On one worker only: it has the long requests; see *Router*, in flight. On all: add memory.",
    ),
    lines(
        "Host tier",
        {
            "{{move}}": rate("transom_kv_host_moved_blocks_total", GROUP, "move"),
            "dropped": rate("transom_kv_host_evicted_blocks_total", GROUP),
        },
        "ops",
        shows="Blocks a second that moved between device and host tier: spilled (evicted from the device), swapped (of "
        "preempted requests), imported (from other workers or the disk), loaded (back to the device), and dropped.",
        act="Dropped and nothing loaded: the tier is too small for what returns; raise `--swap-space`. "
        "Spilled and loaded alike for long: the runbook of TransomHostTierThrashing.",
    ),
    lines(
        "Host tier: blocks and pages",
        {
            "{{group}} {{state}}": f"sum by (group, state) (transom_kv_host_blocks{{{GROUP}}})",
            "held by imports": f"sum(transom_kv_host_import_blocks{{{GROUP}}})",
            "leased pages": f"sum(transom_kv_host_pages{{{WORKER},state='leased'}})",
        },
        "short",
        shows="Blocks of the host tier: cached (can be hit), other (of swapped requests and imports), empty, "
        "held by imports until their requests are admitted; its leased pages.",
        act="Other near cached: many requests are preempted; lower `--max-num-seqs` or add memory.",
    ),
    lines(
        "Prompt tokens that the host tier spared",
        {"spared": rate("transom_prefix_host_tokens_total", WORKER)},
        "short",
        shows="Prompt tokens a second that were loaded from the host tier instead of being computed.",
        act="0 beside spilled blocks: nothing returns, or loading takes longer than computing.",
    ),
    lines(
        "Tokens thrown away",
        {"thrown away": THROWN_AWAY},
        "percentunit",
        shows="Computed tokens that preemptions threw away, over all that were computed. Dashed: 5 % and 20 %. "
        "The cache may give some of them back.",
        act="Over 5 %: the batch is larger than the pool; lower `--max-num-seqs`.",
        limits=high_is_bad(0.05, 0.2),
        width=12,
    ),
    lines(
        "Compacted blocks",
        split(rate, "transom_kv_compacted_blocks_total", WORKER, "worker"),
        "ops",
        shows="Blocks moved to let an allocation succeed, a second, by worker.",
        act="Constant: groups compete for pages; more memory ends it.",
        width=12,
    ),
]
