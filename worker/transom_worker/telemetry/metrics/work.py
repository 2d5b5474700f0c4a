"""Metric families of queue and scheduler (running and waiting requests, computed tokens by phase, preemptions, the load), of
grammars (what compiling and masks cost), and of KV policies (what they keep and drop, and how far their answers are from full
attention)."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from transom_core.clock import steady_time_s
from transom_core.contract import WorkerLoad
from transom_core.telemetry.own_labels import OwnLabels
from transom_worker.scheduling.work_counts import PolicyStats, WorkCounts
from transom_worker.telemetry.engine_events import AdapterStats, GrammarStats, WorkerState


def work_families(own: OwnLabels, state: WorkerState) -> Iterator[Metric]:
    """Yield every metric family of queue and scheduler."""
    yield from _computed(own, state.work)
    yield own.counters(
        "transom_preemptions",
        "Running requests that were put back into the queue, to free memory or because another client had its turn.",
        ("mode",),
        [((mode,), count) for mode, count in state.work.preemptions.items()],
    )
    yield own.counters(
        "transom_preempted_tokens",
        "Computed tokens of preempted requests: recompute threw them away, swap kept them in the host tier.",
        ("mode",),
        [((mode,), count) for mode, count in state.work.tokens_of_preempted.items()],
    )
    yield own.gauges(
        "transom_kv_headroom_requests",
        "Requests of this many tokens (max: the longest that is served) that could start now and all reach their "
        "full length, with cached blocks counted as free.",
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
        "Tokens computed: prefill (known when the request came), decode (sampled here), repair (restoring windows "
        "below a hit's end) and recompute (lost to a preemption).",
        ("phase",),
        [((phase,), tokens) for phase, tokens in phases.items()],
    )
    rows = {"prefill": work.prefill_rows, "decode": work.num_rows - work.prefill_rows}
    yield own.counters(
        "transom_step_rows",
        "Rows of steps (a sequence in a step): decode rows compute nothing but sampled tokens, prefill rows anything "
        "else.",
        ("kind",),
        [((kind,), count) for kind, count in rows.items()],
    )


def _load(own: OwnLabels, load: WorkerLoad) -> Iterator[Metric]:
    """Yield the families of the load that routers and the autoscaler see."""
    yield own.gauge("transom_requests_running", "Requests that hold KV blocks and are computed.", load.num_running)
    yield own.gauge("transom_requests_waiting", "Requests in the queue, preempted ones among them.", load.num_waiting)
    yield own.gauge(
        "transom_load_waiting_tokens",
        "Tokens to compute before every request here has its next token.",
        load.waiting_tokens,
    )
    yield own.gauge("transom_load_used_ratio", "Share of the KV pool's bytes in active blocks.", load.used_share)
    yield own.gauge(
        "transom_load_prefill_tokens_per_second",
        "Tokens per second of recent steps with prompt tokens, smoothed; 0 until measured.",
        load.prefill_tokens_per_s,
    )
    yield own.gauge(
        "transom_load_decode_step_seconds",
        "Seconds of recent steps without prompt tokens, smoothed; 0 until measured.",
        load.decode_step_s,
    )
    yield own.gauge(
        "transom_load_first_token_seconds",
        "Seconds from arrival at the worker to the first token of recent requests, smoothed; 0 until measured.",
        load.first_token_s,
    )


def grammar_families(own: OwnLabels, stats: GrammarStats) -> Iterator[Metric]:
    """Every family of grammars."""
    yield own.counter("transom_grammar_requests", "Requests with a grammar for their answers.", stats.num_requests)
    yield own.counter(
        "transom_grammar_failed_requests",
        "Requests that ended with an error because of their grammar.",
        stats.num_failed,
    )
    yield own.gauge("transom_grammar_running_requests", "Running requests with a grammar.", stats.num_running)
    yield own.counters(
        "transom_grammar_compiles",
        "Grammars of requests: compiled, or found in the cache.",
        ("outcome",),
        [(("compiled",), stats.num_compiled), (("cached",), stats.num_cached)],
    )
    yield own.counter(
        "transom_grammar_compile_seconds",
        "Seconds that compiling grammars took; the first one includes reading the vocabulary.",
        stats.compile_s,
    )
    yield own.gauge("transom_grammar_cache_bytes", "Bytes of the cached grammars.", stats.cache_bytes)
    yield own.counter("transom_grammar_masks", "Masks of allowed tokens that were computed.", stats.num_masks)
    yield own.counter(
        "transom_grammar_mask_seconds", "Seconds that the engine's thread waited for masks.", stats.mask_s
    )


def adapter_families(own: OwnLabels, stats: AdapterStats) -> Iterator[Metric]:
    """Every family of LoRA adapters."""
    states = {"used": stats.num_used, "idle": stats.num_idle, "free": stats.num_free}
    yield own.gauges(
        "transom_lora_slots",
        "Slots for LoRA adapters: used by requests, idle (its adapter has no request) or free.",
        ("state",),
        [((state,), count) for state, count in states.items()],
    )
    yield own.counter("transom_lora_loads", "LoRA adapters that were loaded into a slot.", stats.num_loads)
    yield own.counter("transom_lora_load_seconds", "Seconds for which steps waited for these loads.", stats.load_s)


def policy_families(own: OwnLabels, policies: Mapping[str, PolicyStats]) -> Iterator[Metric]:
    """Every family of KV policies, with a series for each type of policy."""
    counters = (
        ("requests", "Requests with a KV policy: window, adaptive or heavy.", "num_requests"),
        ("dropped_blocks", "KV blocks that policies dropped from running requests.", "num_dropped_blocks"),
        (
            "compared_tokens",
            "Tokens of requests with kv_quality that were compared with full attention.",
            "num_compared",
        ),
        ("agreeing_tokens", "Compared tokens whose most likely next token is that of full attention.", "num_agreeing"),
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
        ("seen_tokens", "Computed or cached tokens of running requests with a KV policy.", "seen_tokens"),
        ("kept_tokens", "Tokens for which running requests with a KV policy hold KV blocks.", "kept_tokens"),
        (
            "window_tokens",
            "Tokens for which running requests with a KV policy hold KV blocks, those of sinks left out.",
            "window_tokens",
        ),
    )
    for name, text, field in counters:
        yield own.counters(f"transom_kv_policy_{name}", text, ("policy",), _series(policies, field))
    for name, text, field in gauges:
        yield own.gauges(f"transom_kv_policy_{name}", text, ("policy",), _series(policies, field))


def _series(policies: Mapping[str, PolicyStats], field: str) -> list[tuple[tuple[str, ...], float]]:
    return [((policy,), getattr(stats, field)) for policy, stats in policies.items()]
