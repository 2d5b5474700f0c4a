"""The KV cache dashboard's sections about prefixes that workers fetch from each other, about the disk tier, and about requests' KV
policies: what they keep, drop and change."""

from dashboards.panels import lines
from dashboards.queries import WORKER, quantile, rate, rates_ratio, split, total, totals_ratio

TRANSFERS = [
    lines(
        "Transfers by outcome",
        split(rate, "transom_kv_transfers_total", WORKER, "direction", "outcome"),
        "ops",
        shows="Cached prefixes that workers fetched from each other (in) and gave away (out), a second, "
        "by how that ended.",
        act="`not_found`: sources evict too early. `no_space`: a larger `--swap-space`. "
        "`timeout`, `source_lost`, `expired`: the network or a worker. Every one of these costs a prompt to compute.",
    ),
    lines(
        "Bytes of transfers",
        {
            "{{direction}}": rate("transom_kv_transfer_bytes_total", WORKER, "direction"),
            "in, at full length": rate("transom_kv_transfer_full_length_bytes_total", WORKER),
        },
        "Bps",
        shows="Bytes of KV blocks that came from other workers (in) and were read for them (out), a second, "
        "beside what would have come, were all tokens of sliding windows moved as well.",
        act="Near the network's limit: the rates in the workers' `fetch_speeds` fall, and routers let more be computed.",
    ),
    lines(
        "Wait for a prefix p95",
        {"p95": quantile(0.95, "transom_kv_transfer_seconds", WORKER)},
        "s",
        shows="How long requests were held while their prefix came from another worker.",
        act="Near `--kv-transfer-timeout-s`: see *Transfers by outcome*.",
    ),
]


DISK = [
    lines(
        "Blocks on disk by event",
        split(rate, "transom_disk_blocks_total", WORKER, "event"),
        "ops",
        shows="KV blocks of the disk tier, a second: "
        "written behind, read for prompts, evicted for newer ones, and what went wrong.",
        act="`broken`, `failed`: the disk or its file system; those prompts are computed. `dropped`: "
        "the disk is slower than blocks leave the memory. Far more `evicted` than `read`: a larger `--disk-space`.",
    ),
    lines(
        "Ranks that write to disk",
        {"{{worker}} rank {{rank}}": total("transom_disk_usable", WORKER, "worker", "rank")},
        "short",
        shows="1 for each rank that writes to its disk tier, 0 for a minute after a write has failed.",
        act="0 with `--disk-cache`: see the worker's log; the directory is full, or gone.",
    ),
]


POLICY = "transom_kv_policy"
QUALITIES = {"kl_nats": "KL", "agreeing_tokens": "agreement", "dropped_attention": "dropped attention"}
POLICIES = [
    lines(
        "Kept tokens by policy",
        {"{{policy}}": totals_ratio(f"{POLICY}_kept_tokens", f"{POLICY}_seen_tokens", WORKER, "policy")},
        "percentunit",
        shows="Tokens that running requests with a KV policy have blocks for, over those that they have computed.",
        act="Near 1: requests are shorter than their windows, and the policy saves nothing.",
    ),
    lines(
        "Blocks dropped and windows",
        {
            "{{policy}} requests a second": rate(f"{POLICY}_requests_total", WORKER, "policy"),
            "{{policy}} blocks a second": rate(f"{POLICY}_dropped_blocks_total", WORKER, "policy"),
            "{{policy}} window": totals_ratio(
                f"{POLICY}_window_tokens", f"{POLICY}_running_requests", WORKER, "policy"
            ),
        },
        "short",
        shows="Requests that arrive with a policy and blocks that policies drop, a second, "
        "and the mean window of running requests in tokens.",
        act="An adaptive window at its largest: raise `max_window`, or the threshold.",
    ),
    lines(
        "Quality by policy",
        {
            "{{policy}} " + legend: rates_ratio(
                f"{POLICY}_{of}_total", f"{POLICY}_compared_tokens_total", WORKER, "policy"
            )
            for of, legend in QUALITIES.items()
        },
        "short",
        shows="Of tokens compared with full attention (kv_quality): "
        "mean KL in nats, share with the same top token, and share of the attention that was dropped.",
        act="KL over 0.1: the window is too small for these requests; docs/kv_policies.md says which ones.",
    ),
]
