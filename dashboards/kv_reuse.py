"""The KV cache dashboard's sections about reuse: hits, evictions and their ages, checkpoints."""

from dashboards.colors import OUTCOMES
from dashboards.panels import Panel, areas, heat, lines
from dashboards.queries import GROUP, WORKER, buckets, rate, ratio, split, total

PREFIX = "transom_prefix_tokens_total"
FOUND = f'{WORKER},outcome=~"hit|repaired"'
HIT_RATE = ratio(rate(PREFIX, FOUND), rate(PREFIX, WORKER))


HITS = [
    areas(
        "Prompt tokens by outcome",
        split(rate, PREFIX, WORKER, "outcome", "reason"),
        "short",
        shows="Every prompt token, a second: hit, repaired, or missed with its reason. "
        "They add up to all prompt tokens. Red and orange: more memory would have hit.",
        act="`never_seen` is new text. `full_evicted`, `window_evicted`: too little memory. "
        "`state_not_kept`: prompts part at a new place. `below_alignment`, `last_token`: normal in small amounts. "
        "`policy`: a client or setting turned the cache off.",
        colors=OUTCOMES,
        width=12,
    ),
    lines(
        "Hit rate by worker",
        {"{{worker}}": ratio(rate(PREFIX, FOUND, "worker"), rate(PREFIX, WORKER, "worker"), "worker")},
        "percentunit",
        shows="Share of prompt tokens that were not computed again.",
        act="One worker far below: it is new or lost its cache. All fall together: traffic changed, or memory is short.",
        maximum=1,
        width=12,
    ),
    areas(
        "Requests by outcome",
        split(rate, "transom_prefix_requests_total", WORKER, "outcome"),
        "reqps",
        shows="Admitted requests, a second, by the best that happened to them.",
        act="Few hits though clients share prompts: their text differs early, for instance by a date in the first line.",
        colors=OUTCOMES,
    ),
    lines(
        "Tokens requested and computed",
        {
            "asked for": rate("transom_prompt_tokens_total", WORKER),
            "computed": rate("transom_computed_tokens_total", f'{WORKER},phase!="decode"'),
        },
        "short",
        shows="Prompt tokens admitted and prompt tokens computed, a second; the gap is what the cache saved.",
        act="Computed above requested: preempted requests are computed again; see *Shortage and repairs*.",
    ),
    lines(
        "Misses from lack of memory",
        {"evicted before": ratio(rate(PREFIX, f'{WORKER},reason=~".*_evicted"'), rate(PREFIX, WORKER))},
        "percentunit",
        shows="Share of prompt tokens that had been cached and were evicted. It is what more memory could win.",
        act="Over a tenth for long: a larger pool or more workers pay off; `transom bench simulate` says how much.",
    ),
]


EVICTION: list[Panel] = [
    heat(
        "Age at eviction",
        buckets("transom_kv_residency_seconds", GROUP),
        "s",
        shows="From when a block became cached to its eviction; a cell counts blocks.",
        act="Ages below those of *Age at a hit*: blocks are evicted before a request returns for them. Add memory.",
    ),
    heat(
        "Age at a hit",
        buckets("transom_kv_reuse_interval_seconds", GROUP),
        "s",
        shows="From when a block became cached to its hit; a cell counts blocks.",
        act="Nothing here means that nothing is reused: see *Requests by outcome*.",
    ),
    areas(
        "Evicted blocks by reason",
        split(rate, "transom_kv_evicted_blocks_total", GROUP, "reason"),
        "ops",
        shows="Blocks evicted, a second, by what needed their memory.",
        act="Compare with *Misses from lack of memory*: evictions without misses cost nothing.",
    ),
]


CHECKPOINTS = [
    areas(
        "Checkpoints by kind",
        split(total, "transom_kv_checkpoints", WORKER, "kind"),
        "short",
        shows="Positions in the prefix tree that a request can continue from, by what they were placed for.",
        act="None while requests end: prefix caching is off. Only `prompt` and `generation`: turns are not recognised.",
    ),
    lines(
        "Checkpoint changes",
        split(rate, "transom_kv_checkpoint_changes_total", WORKER, "change"),
        "ops",
        shows="Placed, hit, evicted (given_up), or only their windows evicted (windows_given_up), a second.",
        act="Evicted as fast as placed, with few hits: memory is short.",
    ),
    areas(
        "Hits of checkpoints by kind",
        split(rate, "transom_kv_checkpoint_changes_total", f'{WORKER},change="hit"', "kind"),
        "ops",
        shows="Requests that continued from a checkpoint, a second, by what it was placed for.",
        act="A kind with many checkpoints and no hits does not pay: requests do not return to it.",
    ),
]
