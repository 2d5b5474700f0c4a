"""The KV cache dashboard's sections about reuse: hits, evictions and their ages, checkpoints."""

from __future__ import annotations

from dashboards.board import Section
from dashboards.colors import OUTCOMES
from dashboards.panels import About, heat, lines
from dashboards.queries import GROUP, WORKER, Query, buckets, mean, quantile, rate, ratio, split, total

PREFIX = "transom_prefix_tokens_total"
FOUND = f'{WORKER},outcome=~"hit|repaired"'
HIT_RATE = ratio(rate(PREFIX, FOUND), rate(PREFIX, WORKER))


HITS = Section(
    title="Hits",
    panels=[
        lines(
            About(
                title="Prompt tokens by outcome",
                shows="Every prompt token, a second: hit, repaired, or missed with its reason. They add "
                "up to all prompt tokens. Red and orange: more memory would have hit.",
                act="`never_seen` is new text. `full_evicted`, `window_evicted`: too little memory. `below_alignment`, "
                "`last_token`: normal in small amounts. `policy`: a client or setting turned the cache off.",
            ),
            split(rate, PREFIX, WORKER, "outcome", "reason"),
            "short",
            stack=True,
            colors=OUTCOMES,
            width=12,
        ),
        lines(
            About(
                title="Hit rate by worker",
                shows="Share of prompt tokens that were not computed again.",
                act="One worker far below: it is new or lost its cache. All fall together: traffic "
                "changed, or memory is short.",
            ),
            [
                Query(
                    expr=ratio(rate(PREFIX, FOUND, "worker"), rate(PREFIX, WORKER, "worker"), "worker"),
                    legend="{{worker}}",
                )
            ],
            "percentunit",
            maximum=1,
            width=12,
        ),
        lines(
            About(
                title="Requests by outcome",
                shows="Admitted requests, a second, by the best that happened to them.",
                act="Few hits though clients share prompts: their text differs early, for instance by "
                "a date in the first line.",
            ),
            split(rate, "transom_prefix_requests_total", WORKER, "outcome"),
            "reqps",
            stack=True,
            colors=OUTCOMES,
        ),
        lines(
            About(
                title="Tokens requested and computed",
                shows="Prompt tokens admitted and prompt tokens computed, a second; the gap is what the cache saved.",
                act="Computed above requested: preempted requests are computed again; see *Shortage and repairs*.",
            ),
            [
                Query(expr=rate("transom_prompt_tokens_total", WORKER), legend="asked for"),
                Query(expr=rate("transom_computed_tokens_total", f'{WORKER},phase!="decode"'), legend="computed"),
            ],
            "short",
        ),
        lines(
            About(
                title="Misses from lack of memory",
                shows="Share of prompt tokens that had been cached and were evicted. It is what more memory could win.",
                act="Over a tenth for long: a larger pool or more workers pay off; `transom bench "
                "simulate` says how much.",
            ),
            [
                Query(
                    expr=ratio(rate(PREFIX, f'{WORKER},reason=~".*_evicted"'), rate(PREFIX, WORKER)),
                    legend="evicted before",
                )
            ],
            "percentunit",
        ),
    ],
)


RESIDENCY = "transom_kv_residency_seconds"
REUSE = "transom_kv_reuse_interval_seconds"
EVICTION = Section(
    title="Eviction",
    panels=[
        heat(
            About(
                title="Age at eviction",
                shows="From when a block became cached to its eviction; a cell counts blocks.",
                act="Ages below those of *Age at a hit*: blocks are evicted before a request returns for them. Add memory.",
            ),
            buckets(RESIDENCY, GROUP),
            "s",
        ),
        heat(
            About(
                title="Age at a hit",
                shows="From when a block became cached to its hit; a cell counts blocks.",
                act="Nothing here means that nothing is reused: see *Requests by outcome*.",
            ),
            buckets(REUSE, GROUP),
            "s",
        ),
        lines(
            About(
                title="Evicted blocks by reason",
                shows="Blocks evicted, a second, by what needed their memory.",
                act="Compare with *Misses from lack of memory*: evictions without misses cost nothing.",
            ),
            split(rate, "transom_kv_evicted_blocks_total", GROUP, "reason"),
            "ops",
            stack=True,
        ),
        lines(
            About(
                title="Ages, median",
                shows="Median age at eviction and at a hit, by group.",
                act="Eviction below hit: blocks are evicted sooner than requests return.",
            ),
            [
                Query(expr=quantile(0.5, RESIDENCY, GROUP, "group"), legend="{{group}} evicted"),
                Query(expr=quantile(0.5, REUSE, GROUP, "group"), legend="{{group}} hit"),
            ],
            "s",
        ),
        lines(
            About(
                title="Ages, mean",
                shows="Mean age at eviction and at a hit, by group; far from the median where a few blocks stay long.",
                act="As for the median.",
            ),
            [
                Query(expr=mean(RESIDENCY, GROUP, "group"), legend="{{group}} evicted"),
                Query(expr=mean(REUSE, GROUP, "group"), legend="{{group}} hit"),
            ],
            "s",
        ),
    ],
)


CHECKPOINTS = Section(
    title="Checkpoints",
    panels=[
        lines(
            About(
                title="Checkpoints by kind",
                shows="Positions in the prefix tree that a request can continue from, by what they were placed for.",
                act="None while requests end: prefix caching is off. Only `prompt` and `generation`: "
                "turns are not recognised.",
            ),
            split(total, "transom_kv_checkpoints", WORKER, "kind"),
            "short",
            stack=True,
        ),
        lines(
            About(
                title="Checkpoint changes",
                shows="Placed, hit, evicted (given_up), or only their windows evicted (windows_given_up), a second.",
                act="Evicted as fast as placed, with few hits: memory is short.",
            ),
            split(rate, "transom_kv_checkpoint_changes_total", WORKER, "change"),
            "ops",
        ),
        lines(
            About(
                title="Hits of checkpoints by kind",
                shows="Requests that continued from a checkpoint, a second, by what it was placed for.",
                act="A kind with many checkpoints and no hits does not pay: requests do not return to it.",
            ),
            split(rate, "transom_kv_checkpoint_changes_total", f'{WORKER},change="hit"', "kind"),
            "ops",
            stack=True,
        ),
    ],
)
