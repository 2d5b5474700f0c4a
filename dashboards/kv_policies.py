"""The KV cache dashboard's section about requests' KV policies: what they keep, drop and change."""

from __future__ import annotations

from dashboards.panels import lines
from dashboards.queries import WORKER, rate, ratio, total

POLICIES = [
    lines(
        "Kept tokens by policy",
        {
            "{{policy}}": ratio(
                total("transom_kv_policy_kept_tokens", WORKER, "policy"),
                total("transom_kv_policy_seen_tokens", WORKER, "policy"),
                "policy",
            )
        },
        "percentunit",
        shows="Tokens that running requests with a KV policy have blocks for, over those that they have computed.",
        act="Near 1: requests are shorter than their windows, and the policy saves nothing.",
    ),
    lines(
        "Blocks dropped and windows",
        {
            "{{policy}} requests a second": rate("transom_kv_policy_requests_total", WORKER, "policy"),
            "{{policy}} blocks a second": rate("transom_kv_policy_dropped_blocks_total", WORKER, "policy"),
            "{{policy}} window": ratio(
                total("transom_kv_policy_window_tokens", WORKER, "policy"),
                total("transom_kv_policy_running_requests", WORKER, "policy"),
                "policy",
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
            "{{policy}} " + legend: ratio(
                rate(f"transom_kv_policy_{name}_total", WORKER, "policy"),
                rate("transom_kv_policy_compared_tokens_total", WORKER, "policy"),
                "policy",
            )
            for name, legend in (
                ("kl_nats", "KL"),
                ("agreeing_tokens", "agreement"),
                ("dropped_attention", "dropped attention"),
            )
        },
        "short",
        shows="Of tokens compared with full attention (kv_quality): "
        "mean KL in nats, share with the same top token, and share of the attention that was dropped.",
        act="KL over 0.1: the window is too small for these requests; docs/kv_policies.md says which ones.",
    ),
]
