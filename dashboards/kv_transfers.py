"""Panels of prefixes that workers fetch from each other, for the dashboard of the KV cache."""

from __future__ import annotations

from dashboards.board import Section
from dashboards.panels import About, lines
from dashboards.queries import WORKER, Query, quantile, rate, split

TRANSFERS = Section(
    title="Transfers between workers",
    panels=[
        lines(
            About(
                title="Transfers by outcome",
                shows="Cached prefixes that workers fetched from each other (in) and gave away (out), a second, by how that ended.",
                act="`not_found`: sources evict too early. `no_space`: a larger `--swap-space`. `timeout`, "
                "`source_lost`, `expired`: the network or a worker. Every one of these costs a prompt to compute.",
            ),
            split(rate, "transom_kv_transfers_total", WORKER, "direction", "outcome"),
            "ops",
        ),
        lines(
            About(
                title="Bytes of transfers",
                shows="Bytes of KV blocks that came from other workers (in) and were read for them (out), a second, beside what "
                "would have come, were all tokens of sliding windows moved as well.",
                act="Near the network's limit: `fetch_bytes_per_s` of the workers falls, and routers let more be computed.",
            ),
            [
                Query(expr=rate("transom_kv_transfer_bytes_total", WORKER, "direction"), legend="{{direction}}"),
                Query(expr=rate("transom_kv_transfer_full_length_bytes_total", WORKER), legend="in, at full length"),
            ],
            "Bps",
        ),
        lines(
            About(
                title="Wait for a prefix p95",
                shows="How long requests were held while their prefix came from another worker.",
                act="Near `--kv-transfer-timeout-s`: see *Transfers by outcome*.",
            ),
            [Query(expr=quantile(0.95, "transom_kv_transfer_seconds", WORKER), legend="p95")],
            "s",
        ),
    ],
)
