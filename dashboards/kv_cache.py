"""KV cache: what the blocks hold, and whether that is enough; `kv_reuse.py` has what the cache saves."""

from dashboards import kv_reuse, kv_shortage
from dashboards.board import Board
from dashboards.colors import BLOCK_STATES, PAGE_STATES
from dashboards.kv_tiers import DISK, POLICIES, TRANSFERS
from dashboards.panels import Panel, areas, high_is_bad, lines, low_is_bad, number
from dashboards.queries import GROUP, WORKER, or_zero, rate, split, total

UID = "transom-kv-cache"
HEADROOM_OF = 'transom_kv_headroom_requests{%s,length="%s"}'
HEADROOM = f"sum ({HEADROOM_OF % (WORKER, 1024)} or on (model, worker) {HEADROOM_OF % (WORKER, 'max')})"
USED_BY_WORKER = total("transom_kv_utilization_ratio", WORKER, "worker")


NOW = [
    number(
        "In use",
        f"max({USED_BY_WORKER})",
        "percentunit",
        shows="Share of the pool that running requests use, of the fullest worker. Orange from 80 %, red from 95 %.",
        act="Near 100 % with preemptions: add workers or memory, or lower `--max-num-seqs`.",
        limits=high_is_bad(0.8, 0.95),
    ),
    number(
        "Headroom",
        HEADROOM,
        "short",
        shows="Requests of 1,024 tokens (of the longest, "
        "where that is less) that could start now on all workers together. Red below 1, orange below 4.",
        act="At zero new requests wait: see *Shortage and repairs* below, and add workers.",
        limits=low_is_bad(1, 4),
    ),
    number(
        "Hit rate",
        kv_reuse.HIT_RATE,
        "percentunit",
        shows="Share of prompt tokens that were not computed again, hits and repaired ones.",
        act="A drop: *Prompt tokens by outcome* gives the reason for each that was missed.",
    ),
    number(
        "Evicted",
        or_zero(rate("transom_kv_evicted_blocks_total", GROUP)),
        "ops",
        shows="Blocks evicted, a second.",
        act="High with misses for `full_evicted` or `window_evicted`: the cache is too small for the traffic.",
    ),
    number(
        "Preempted",
        or_zero(rate("transom_preemptions_total", WORKER)),
        "ops",
        shows="Requests sent back to the queue for want of blocks, a second. "
        "Orange from one in ten seconds, red from one.",
        act="Lower `--max-num-seqs`, add memory (`--kv-cache-memory-bytes`) or workers.",
        limits=high_is_bad(0.1, 1),
    ),
]


POOL_BYTES = total("transom_kv_pool_bytes", WORKER)
POOL: list[Panel] = [
    areas(
        "Bytes by group and state",
        {"{{group}} {{state}}": total("transom_kv_bytes", GROUP, "group", "state"), "pool": POOL_BYTES},
        "bytes",
        shows="Active blocks belong to running requests, cached ones can be hit, "
        "empty ones are free inside leased pages. Dashed: the whole pool, all groups.",
        act="Cached near nothing: prefixes do not survive, so add memory. Empty large: see *Fragmentation and waste*. "
        "One group takes nearly all: its layers decide how many requests fit; `transom plan` says why.",
        unstacked=["pool"],
        shades=BLOCK_STATES,
        width=12,
    ),
    areas(
        "Cached bytes by worker",
        split(total, "transom_kv_bytes", f'{GROUP},state="cached"', "worker"),
        "bytes",
        shows="What could be hit at each worker.",
        act="Workers differ much: the router sends prefixes to few of them, see *Router*, placements. "
        "One falls to zero: it was started again.",
        width=12,
    ),
    lines(
        "Pinned cached blocks",
        {
            "{{group}} cached": total("transom_kv_blocks", f'{GROUP},state="cached"', "group"),
            "{{group}} pinned": total("transom_kv_held_blocks", GROUP, "group"),
        },
        "short",
        shows="Cached blocks by group, and those of them that a checkpoint pins; the others are evicted first.",
        act="Near zero though blocks are cached: hits end early; see *Checkpoints by kind*.",
    ),
    areas(
        "Pages by state",
        split(total, "transom_kv_pages", WORKER, "state"),
        "short",
        shows="Arena pages: leased by a group, or free for any.",
        act="Leased at the top is normal. Pages that change hands often show up as compaction below.",
        colors=PAGE_STATES,
    ),
    lines(
        "Fragmentation and waste",
        {
            "{{worker}} fragmentation": f"max by (worker) (transom_kv_fragmentation_ratio{{{WORKER}}})",
            "waste": f"max (transom_kv_waste_ratio{{{WORKER}}})",
        },
        "percentunit",
        shows="Fragmentation: bytes in empty blocks over leased ones. "
        "Waste: share of a page that no block covers, by geometry, of the worst worker. Dashed: 20 % and 40 %.",
        act="Waste does not change while a worker runs: another `--block-size` does. Fragmentation: watch compaction.",
        limits=high_is_bad(0.2, 0.4),
    ),
    lines(
        "Headroom in requests",
        split(total, "transom_kv_headroom_requests", WORKER, "length"),
        "short",
        shows="How many requests of each length in tokens could start now, all workers together; "
        "`max` is the longest that the model takes. Cached blocks count as room. Dashed: 1 and 4.",
        act="At zero for a length, such requests wait or preempt others: add workers or memory.",
        limits=low_is_bad(1, 4),
    ),
    lines(
        "Bytes per token",
        {"{{group}} {{dtype}}": f"max by (group, dtype) (transom_kv_token_bytes{{{WORKER}}})"},
        "bytes",
        shows="What a token takes in a group's blocks on the first rank, with the scales of fp8, int8 and int4.",
        act="Two formats of one group: workers have different --kv-cache-dtype, or a redeploy is under way.",
    ),
]


BOARD = Board(
    uid=UID,
    title="KV cache",
    description="Every block by group and state, what hits and what does not, what is evicted, and what a "
    "lack of memory costs.",
    variables=frozenset({"model", "worker", "group"}),
    sections={
        "Now": NOW,
        "Pool": POOL,
        "Hits": kv_reuse.HITS,
        "Eviction": kv_reuse.EVICTION,
        "Checkpoints": kv_reuse.CHECKPOINTS,
        "Shortage and repairs": kv_shortage.SHORTAGE,
        "KV policies": POLICIES,
        "Transfers between workers": TRANSFERS,
        "Disk tier": DISK,
    },
)
