"""Metric families about what a worker is: versions, its resolved settings, and how long its start took."""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from transom_core.config import EngineConfig
from transom_core.telemetry.build_versions import build_info, build_versions
from transom_core.telemetry.own_labels import OwnLabels
from transom_worker.execution.executor import ExecutorInfo
from transom_worker.telemetry.engine_events import EngineEventSink

# The labels of the worker's settings, and what each is.
CONFIG_LABELS: dict[str, Callable[[EngineConfig, ExecutorInfo], object]] = {
    "dtype": lambda config, info: info.dtype,
    "kv_cache_dtype": lambda config, info: info.plan.kv_dtype,
    "device": lambda config, info: info.ranks[0].memory.device if info.ranks else info.memory.device,
    "tensor_parallel_size": lambda config, info: config.ranks.size,
    "block_size": lambda config, info: config.cache.block_size,
    "max_model_len": lambda config, info: info.max_model_len,
    "max_num_seqs": lambda config, info: config.scheduler.max_num_seqs,
    "max_num_batched_tokens": lambda config, info: config.scheduler.max_num_batched_tokens,
    "scheduling_policy": lambda config, info: config.scheduler.policy,
    "prefix_caching": lambda config, info: str(config.cache.enable_prefix_caching).lower(),
    "hybrid_kv_cache": lambda config, info: str(config.model.hybrid_kv_cache).lower(),
    "kernels": lambda config, info: info.kernels,
    "identity": lambda config, info: info.identity,
}


class Identity(EngineEventSink, Collector):
    """Two info families whose value is always 1, the limits of batch and queue, KV bytes per token, and the seconds that the start
    took."""

    def __init__(self, own: OwnLabels) -> None:
        self._own = own
        self._versions = build_versions("torch", "triton", "ray")
        self._config: tuple[str, ...] | None = None
        self._limits: dict[str, int] = {}
        self._token_bytes: list[tuple[tuple[str, str], float]] = []  # by group and number format
        self.start_s = 0.0

    def started(self, config: EngineConfig, info: ExecutorInfo) -> None:
        """Set the values that are known now: device, number format, longest sequence and kernels."""
        scheduler = config.scheduler
        self._config = tuple(str(value(config, info)) for value in CONFIG_LABELS.values())
        self._token_bytes = [((group.name, group.dtype), group.bytes_per_token) for group in info.plan.groups]
        self._limits = {"running": scheduler.max_num_seqs, "waiting": scheduler.max_waiting}

    def collect(self) -> Iterator[Metric]:
        """Make the metric families; the client library calls this at each scrape."""
        yield build_info(self._own, self._versions)
        yield self._own.gauges(
            "transom_worker_config_info",
            "The worker's resolved settings; the value is always 1.",
            tuple(CONFIG_LABELS),
            [(self._config, 1)] if self._config else [],
        )
        yield self._own.gauges(
            "transom_requests_limit",
            "Requests that may run at once, and that may wait before others are refused.",
            ("kind",),
            [((kind,), limit) for kind, limit in self._limits.items()],
        )
        yield self._own.gauges(
            "transom_kv_token_bytes",
            "Bytes of the KV cache per token on the first rank, scales included, by group and its number format.",
            ("group", "dtype"),
            self._token_bytes,
        )
        yield self._own.gauge("transom_worker_start_seconds", "Seconds that the worker took to start.", self.start_s)
