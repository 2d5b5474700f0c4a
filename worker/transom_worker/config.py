"""The frozen configs that parts of the system receive, each only its section; `settings.Settings` is resolved into them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LogFormat = Literal["text", "json"]

DEFAULT_CPU_KV_SHARE = 0.25  # of the memory that is free after loading


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, on what, in which number format, and window overrides for its attention layers."""

    model: str
    dtype: Dtype = "auto"
    device: Device = "auto"
    quantization: Literal["none", "int8"] = "none"
    max_model_len: int | None = None
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    window_pattern: str = "S"
    hybrid_kv_cache: bool = True
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pool: its block, its size, whether finished requests' blocks stay findable, and whether lost windows are repaired."""

    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    window_repair: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a step is filled. `max_waiting` bounds the queue; beyond it requests are refused as overload."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting: int = 1024
    steps_in_flight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """The ranks of one worker. `launcher` is who starts them where there are several: local processes, or Ray as actors.

    A step that takes longer than `step_timeout_s` counts as a rank that hangs.
    """

    size: int = 1
    launcher: Literal["processes", "ray"] = "processes"
    step_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Where spans go (OTLP over HTTP), and which share of the requests whose clients do not say is traced."""

    endpoint: str
    sample_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that one worker needs. `num_threads` is each rank's."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    ranks: RanksConfig = RanksConfig()
    num_threads: int | None = None
    tracing: TracingConfig | None = None
    log_format: LogFormat = "text"


RoutingPolicy = Literal["kv", "least_tokens", "round_robin", "power_of_two"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What one client may ask for; None: no limit. Clients are told apart by API key, without keys they are one."""

    requests_per_minute: int | None = None  # of each client
    concurrent_requests: int | None = None  # of each client
    request_timeout_s: float | None = None  # from arrival to the last token
    max_header_bytes: int = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverConfig:
    """How often a request goes on elsewhere when its worker is lost, how many lost workers make it a suspect, and how long it
    waits for a worker that can take it."""

    max_resumes: int = 4
    max_lost_workers: int = 2
    wait_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All that the router needs besides the model's name and files."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_api_key_file: str | None = None
    max_body_bytes: int = 8 * 2**20
    haproxy: bool = False
    routing_policy: RoutingPolicy = "kv"
    salt_by_key: bool = False
    log_prompts: bool = False
    limits: LimitsConfig = LimitsConfig()
    failover: FailoverConfig = FailoverConfig()
    tracing: TracingConfig | None = None
    log_format: LogFormat = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingConfig:
    """Between how many workers the cluster moves, and what it aims at."""

    min_replicas: int
    max_replicas: int
    first_token_objective_s: float
    upscale_delay_s: float
    downscale_delay_s: float
