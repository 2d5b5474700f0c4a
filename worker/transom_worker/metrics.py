"""A worker's Prometheus metrics: requests, tokens, steps, and every block by group and state.

Counters and histograms are fed as things happen. Block counts are read from the last published `CacheStats` when somebody
scrapes, so a step pays nothing for them. The engine's thread writes, any thread may scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # types alone: this module depends on the metrics client and nothing else
    from transom_worker.kvcache.histogram import HistogramStats
    from transom_worker.kvcache.stats import CacheStats, GroupStats
    from transom_worker.scheduling.step import StepTimings

TIME_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_TIME_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
STEP_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
STEP_PARTS = ("schedule", "wait", "output", "prepare", "copy", "forward", "sample")
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class RequestTimes:
    """When things happened to one request, in seconds since the epoch; 0 before they do."""

    __slots__ = ("arrival_s", "first_token_s", "last_token_s", "scheduled_s")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0


class EngineMetrics:
    """One worker's metrics, in a registry of its own; `text()` is its Prometheus page."""

    def __init__(self, *, model: str = "", worker: str = "0") -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model": model, "worker": worker}
        self._requests = self._counters("transom_requests", "Requests by how they ended.", "finish_reason")
        self._prompt_tokens = self._counter("transom_prompt_tokens", "Prompt tokens of admitted requests.")
        self._output_tokens = self._counter("transom_output_tokens", "Tokens generated.")
        self._computed_tokens = self._counter("transom_computed_tokens", "Tokens computed in steps.")
        self._request_s = self._histograms(
            "transom_request_seconds", "From arrival to the last token.", TIME_BUCKETS_S, "finish_reason"
        )
        self._queue_s = self._request_histogram("transom_queue_seconds", "From arrival to the request's first step.")
        self._prefill_s = self._request_histogram(
            "transom_prefill_seconds", "From the request's first step to its first token."
        )
        self._first_token_s = self._request_histogram("transom_first_token_seconds", "From arrival to the first token.")
        self._decode_s = self._request_histogram("transom_decode_seconds", "From the first token to the last.")
        self._inter_token_s = self._histogram(
            "transom_inter_token_seconds", "Between two tokens of one request.", TOKEN_TIME_BUCKETS_S
        )
        steps = self._histograms("transom_step_seconds", "One step, by part.", STEP_BUCKETS_S, "part")
        self._step_parts = {part: steps.labels(*self._labels.values(), part) for part in STEP_PARTS}
        self._step_tokens = self._histogram("transom_step_tokens", "Tokens in one step.", TOKEN_BUCKETS)
        self._step_seqs = self._histogram("transom_step_sequences", "Sequences in one step.", TOKEN_BUCKETS)
        self._lost_ranks = self._counter("transom_rank_restarts", "Times that all ranks were started again.")
        self._collector = _StateCollector(self._labels)
        self.registry.register(self._collector)

    def admitted(self, times: RequestTimes, *, num_prompt_tokens: int) -> None:
        """A request left the queue for the first time: its prompt tokens are counted with their prefix outcomes."""
        times.scheduled_s = time.time()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._queue_s.observe(max(0.0, times.scheduled_s - times.arrival_s))

    def scheduled(self, *, num_tokens: int, num_seqs: int) -> None:
        """A plan went to the ranks."""
        self._computed_tokens.inc(num_tokens)
        self._step_tokens.observe(num_tokens)
        self._step_seqs.observe(num_seqs)

    def stepped(self, timings: StepTimings, *, schedule_s: float, wait_s: float, output_s: float) -> None:
        """A result came back."""
        parts = self._step_parts
        parts["schedule"].observe(schedule_s)
        parts["wait"].observe(wait_s)
        parts["output"].observe(output_s)
        parts["prepare"].observe(timings.prepare_s)
        parts["copy"].observe(timings.copy_s)
        parts["forward"].observe(timings.forward_s)
        parts["sample"].observe(timings.sample_s)

    def token(self, times: RequestTimes, now_s: float) -> None:
        """A request got a token."""
        self._output_tokens.inc()
        if times.first_token_s:
            self._inter_token_s.observe(max(0.0, now_s - times.last_token_s))
        else:
            times.first_token_s = now_s
            self._first_token_s.observe(max(0.0, now_s - times.arrival_s))
            self._prefill_s.observe(max(0.0, now_s - times.scheduled_s))
        times.last_token_s = now_s

    def finished(self, times: RequestTimes, finish_reason: str) -> None:
        """A request ended."""
        labels = (self._labels["model"], self._labels["worker"], finish_reason)
        self._requests.labels(*labels).inc()
        self._request_s.labels(*labels).observe(max(0.0, time.time() - times.arrival_s))
        if times.first_token_s:
            self._decode_s.observe(max(0.0, times.last_token_s - times.first_token_s))

    def rank_lost(self) -> None:
        """A rank was lost, and all of them are started again."""
        self._lost_ranks.inc()

    def publish(self, stats: CacheStats, *, num_running: int, num_waiting: int, preemptions: dict[str, int]) -> None:
        """Replace what a scrape reads of cache and queue. The engine's thread calls this a few times a second."""
        self._collector.state = (stats, num_running, num_waiting, dict(preemptions))

    def text(self, *, openmetrics: bool = False) -> bytes:
        """The page in Prometheus' text format, or as OpenMetrics, which has exemplars."""
        page: bytes = (generate_openmetrics if openmetrics else generate_latest)(self.registry)
        return page

    def _counters(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*self._labels, *labels), registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text).labels(*self._labels.values())

    def _histograms(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, (*self._labels, *labels), buckets=buckets, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histograms(name, text, buckets).labels(*self._labels.values())

    def _request_histogram(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, TIME_BUCKETS_S)


class _StateCollector(Collector):
    """Reads the published state at scrape time."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.state: tuple[CacheStats, int, int, dict[str, int]] | None = None
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        """Families of the last published state; none before the first."""
        if self.state is None:
            return
        stats, num_running, num_waiting, by_mode = self.state
        yield self._gauge("transom_requests_running", "Requests in the batch.", num_running)
        yield self._gauge("transom_requests_waiting", "Requests in the queue.", num_waiting)
        preemptions = CounterMetricFamily("transom_preemptions", "Preemptions by mode.", labels=[*self._names, "mode"])
        for mode, count in by_mode.items():
            preemptions.add_metric([*self._values, mode], count)
        yield preemptions
        yield from self._groups(stats)
        yield from self._times(stats)
        yield from self._arena(stats)
        outcomes = CounterMetricFamily(
            "transom_prefix_tokens", "Prompt tokens by outcome of the hit search.", labels=[*self._names, "outcome"]
        )
        for outcome, tokens in stats.outcome_tokens.items():
            outcomes.add_metric([*self._values, outcome], tokens)
        yield outcomes

    def _arena(self, stats: CacheStats) -> Iterator[Metric]:
        pages = GaugeMetricFamily("transom_kv_pages", "Arena pages by state.", labels=[*self._names, "state"])
        pages.add_metric([*self._values, "free"], stats.free_pages)
        pages.add_metric([*self._values, "leased"], stats.num_pages - stats.free_pages)
        yield pages
        yield self._gauge(
            "transom_kv_fragmentation_ratio", "Bytes in empty blocks over those of leased pages.", stats.fragmentation
        )
        yield self._gauge("transom_kv_waste_ratio", "Largest share of a page that no block covers.", stats.waste)
        yield self._gauge("transom_kv_checkpoints", "Checkpoints in the prefix cache.", stats.num_checkpoints)
        compacted = CounterMetricFamily(
            "transom_kv_compacted_blocks", "Blocks moved to let an allocation succeed.", labels=self._names
        )
        compacted.add_metric(self._values, stats.num_compacted_blocks)
        yield compacted

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _groups(self, stats: CacheStats) -> Iterator[Metric]:
        by_state = [*self._names, "group", "state"]
        blocks = GaugeMetricFamily("transom_kv_blocks", "KV blocks by group and state.", labels=by_state)
        sizes = GaugeMetricFamily("transom_kv_bytes", "Bytes of KV blocks by group and state.", labels=by_state)
        held = GaugeMetricFamily(
            "transom_kv_held_blocks", "Cached blocks that a checkpoint keeps.", labels=[*self._names, "group"]
        )
        use = GaugeMetricFamily(
            "transom_kv_utilization_ratio",
            "Bytes of a group's active blocks over the whole pool.",
            labels=[*self._names, "group"],
        )
        evicted = CounterMetricFamily(
            "transom_kv_evicted_blocks", "Blocks evicted.", labels=[*self._names, "group", "reason"]
        )
        pool_bytes = max(1, stats.num_pages * stats.page_bytes)
        for group in stats.groups:
            for state, count in _states(group):
                blocks.add_metric([*self._values, group.name, state], count)
                sizes.add_metric([*self._values, group.name, state], count * group.block_bytes)
            held.add_metric([*self._values, group.name], group.held_blocks)
            use.add_metric([*self._values, group.name], group.active_blocks * group.block_bytes / pool_bytes)
            for reason, count in group.evicted_blocks.items():
                evicted.add_metric([*self._values, group.name, reason], count)
        yield from (blocks, sizes, held, use, evicted)

    def _times(self, stats: CacheStats) -> Iterator[Metric]:
        by_group = [*self._names, "group"]
        residency = HistogramMetricFamily(
            "transom_kv_residency_seconds", "From when a block became cached to its eviction.", labels=by_group
        )
        reuse = HistogramMetricFamily(
            "transom_kv_reuse_interval_seconds", "From when a block became cached to its hit.", labels=by_group
        )
        for group in stats.groups:
            for family, times in ((residency, group.residency), (reuse, group.reuse_interval)):
                family.add_metric([*self._values, group.name], _cumulative(times), sum_value=times.sum_s)
        yield from (residency, reuse)


def _states(group: GroupStats) -> tuple[tuple[str, int], ...]:
    return (("active", group.active_blocks), ("cached", group.cached_blocks), ("empty", group.empty_blocks))


def _cumulative(times: HistogramStats) -> list[tuple[str, float]]:
    bounds = (*map(str, times.bounds_s), "+Inf")
    return list(zip(bounds, accumulate(times.counts), strict=True))
