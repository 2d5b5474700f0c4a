"""Metric families of answers that are held to grammars: how many there are, and what compiling and masks cost."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from transom_core.telemetry.own_labels import OwnLabels
from transom_worker.telemetry.worker_state import GrammarStats


def grammar_families(own: OwnLabels, stats: GrammarStats) -> Iterator[Metric]:
    """Every family."""
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
        "Seconds that compiling grammars took, on a thread of its own; the first one includes reading the vocabulary.",
        stats.compile_s,
    )
    yield own.gauge(
        "transom_grammar_cache_bytes",
        "Bytes that the compiled grammars which are kept take, estimated from their texts.",
        stats.cache_bytes,
    )
    yield own.counter(
        "transom_grammar_masks",
        "Masks of allowed tokens that were computed: one for each token of an answer.",
        stats.num_masks,
    )
    yield own.counter(
        "transom_grammar_mask_seconds",
        "Seconds that the engine's thread waited for masks; the threads that compute them together take more.",
        stats.mask_s,
    )
