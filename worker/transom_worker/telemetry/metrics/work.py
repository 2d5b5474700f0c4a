"""Metric families of queue and scheduler: running and waiting requests, computed tokens by phase, preemptions, and the load."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from transom_core.clock import steady_time_s
from transom_core.contract import WorkerLoad
from transom_core.telemetry.own_labels import OwnLabels
from transom_worker.scheduling.work_counts import WorkCounts
from transom_worker.telemetry.worker_state import WorkerState


def work_families(own: OwnLabels, state: WorkerState) -> Iterator[Metric]:
    """Yield every metric family of queue and scheduler."""
    yield from _computed(own, state.work)
    yield own.counters(
        "transom_preemptions",
        "Running requests that were put back into the queue, to free memory or because another client had its turn, by mode.",
        ("mode",),
        [((mode,), count) for mode, count in state.work.preemptions.items()],
    )
    yield own.counters(
        "transom_preempted_tokens",
        "Computed tokens of preempted requests, by mode: recompute threw them away, swap kept them in the host tier.",
        ("mode",),
        [((mode,), count) for mode, count in state.work.tokens_of_preempted.items()],
    )
    yield own.gauges(
        "transom_kv_headroom_requests",
        "Requests of this many tokens (max: the longest that is served) that could start now, all at their full length at once, "
        "with every cached block counted as free.",
        ("length",),
        [((length,), count) for length, count in state.headroom.items()],
    )
    yield own.gauge(
        "transom_queue_oldest_seconds",
        "Seconds that the oldest request has waited for its first step; 0 if none waits.",
        # `oldest_waiting_s` is a time of arrival, and 0 if no request waits.
        max(0.0, steady_time_s() - state.oldest_waiting_s) if state.oldest_waiting_s else 0.0,
    )
    yield from _load(own, state.load)


def _computed(own: OwnLabels, work: WorkCounts) -> Iterator[Metric]:
    """Yield the families of computed tokens and of the rows of steps."""
    phases = {
        "prefill": work.prefill_tokens,
        "decode": work.decode_tokens,
        "repair": work.repair_tokens,
        "recompute": work.recompute_tokens,
    }
    yield own.counters(
        "transom_computed_tokens",
        "Tokens computed in steps by phase: prefill (known when the request came), decode (sampled here), repair (restoring "
        "windows below a hit's end) and recompute (lost to a preemption).",
        ("phase",),
        [((phase,), tokens) for phase, tokens in phases.items()],
    )
    rows = {"prefill": work.prefill_rows, "decode": work.num_rows - work.prefill_rows}
    yield own.counters(
        "transom_step_rows",
        "Rows of steps (a sequence in a step) by kind: decode rows compute nothing but sampled tokens, prefill rows anything else.",
        ("kind",),
        [((kind,), count) for kind, count in rows.items()],
    )


def _load(own: OwnLabels, load: WorkerLoad) -> Iterator[Metric]:
    """Yield the families of the load that routers and the autoscaler see."""
    yield own.gauge(
        "transom_requests_running", "Requests that hold KV blocks and are being computed.", load.num_running
    )
    yield own.gauge("transom_requests_waiting", "Requests in the queue, preempted ones among them.", load.num_waiting)
    yield own.gauge(
        "transom_load_waiting_tokens",
        "Tokens to compute before every request here has its next token.",
        load.waiting_tokens,
    )
    yield own.gauge(
        "transom_load_used_ratio",
        "Share of the KV pool's bytes in active blocks.",
        load.used_share,
    )
    yield own.gauge(
        "transom_load_prefill_tokens_per_second",
        "Tokens per second of recent steps with prompt tokens in them, smoothed; 0 until it was measured.",
        load.prefill_tokens_per_s,
    )
    yield own.gauge(
        "transom_load_decode_step_seconds",
        "Seconds of recent steps without prompt tokens, smoothed; 0 until it was measured.",
        load.decode_step_s,
    )
    yield own.gauge(
        "transom_load_first_token_seconds",
        "Seconds from arrival at the worker to the first token of recent requests, smoothed; 0 until it was measured.",
        load.first_token_s,
    )
