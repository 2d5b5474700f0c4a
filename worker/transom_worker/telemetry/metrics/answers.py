"""Metric families of grammars (what compiling and masks cost) and of KV policies (what they keep and drop, and how far their
answers are from full attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from transom_core.telemetry.own_labels import OwnLabels
from transom_worker.scheduling.policy_counts import PolicyStats
from transom_worker.telemetry.worker_state import GrammarStats


def grammar_families(own: OwnLabels, stats: GrammarStats) -> Iterator[Metric]:
    """Every family of grammars."""
    yield own.counter(
        "transom_grammar_requests",
        "Requests that the worker took with a grammar for their answers.",
        stats.num_requests,
    )
    yield own.counter(
        "transom_grammar_failed_requests",
        "Requests that ended with an error because their grammar could not be used, or became too complex.",
        stats.num_failed,
    )
    yield own.gauge(
        "transom_grammar_running_requests", "Requests whose answers are held to a grammar now.", stats.num_running
    )
    yield own.counters(
        "transom_grammar_compiles",
        "Grammars of requests by outcome: compiled, or found among the compiled ones that are kept.",
        ("outcome",),
        [(("compiled",), stats.num_compiled), (("cached",), stats.num_cached)],
    )
    yield own.counter(
        "transom_grammar_compile_seconds",
        "Seconds that compiling grammars took; the first one includes reading the vocabulary.",
        stats.compile_s,
    )
    yield own.gauge(
        "transom_grammar_cache_bytes",
        "Bytes of the compiled grammars that are kept.",
        stats.cache_bytes,
    )
    yield own.counter(
        "transom_grammar_masks",
        "Masks of allowed tokens that were computed: one for each token of an answer.",
        stats.num_masks,
    )
    yield own.counter(
        "transom_grammar_mask_seconds",
        "Seconds that the engine's thread waited for masks.",
        stats.mask_s,
    )


def policy_families(own: OwnLabels, policies: Mapping[str, PolicyStats]) -> Iterator[Metric]:
    """Every family of KV policies, with a series for each type of policy."""
    counters = (
        (
            "requests",
            "Requests that the worker took with a KV policy, by type: window, adaptive or heavy.",
            "num_requests",
        ),
        ("dropped_blocks", "KV blocks that policies dropped from running requests.", "num_dropped_blocks"),
        (
            "compared_tokens",
            "Tokens of requests with kv_quality whose policy was compared with full attention.",
            "num_compared",
        ),
        (
            "agreeing_tokens",
            "Compared tokens whose most likely next token is that of full attention.",
            "num_agreeing",
        ),
        (
            "kl_nats",
            "KL divergence of the policy's next-token distribution from that of full attention, summed over compared tokens.",
            "kl",
        ),
        (
            "dropped_attention",
            "Share of full attention on keys that the policy does not read, summed over compared tokens.",
            "dropped_mass",
        ),
    )
    gauges = (
        ("running_requests", "Running requests with a KV policy.", "num_running"),
        ("seen_tokens", "Tokens of running requests with a KV policy that were computed or found.", "seen_tokens"),
        ("kept_tokens", "Tokens that the KV blocks of running requests with a KV policy have room for.", "kept_tokens"),
        (
            "window_tokens",
            "Tokens that the KV blocks of running requests with a KV policy have room for, without blocks of sinks.",
            "window_tokens",
        ),
    )
    for name, text, field in counters:
        yield own.counters(f"transom_kv_policy_{name}", text, ("policy",), _series(policies, field))
    for name, text, field in gauges:
        yield own.gauges(f"transom_kv_policy_{name}", text, ("policy",), _series(policies, field))


def _series(policies: Mapping[str, PolicyStats], field: str) -> list[tuple[tuple[str, ...], float]]:
    return [((policy,), getattr(stats, field)) for policy, stats in policies.items()]
