"""Frozen config dataclasses, one for each part of the system. `settings.Settings` is resolved into them once, at start-up, and each
part receives only its own."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LogFormat = Literal["text", "json"]
MetricsCompat = Literal["none", "vllm"]
SchedulingPolicy = Literal["fcfs", "priority"]
PreemptionMode = Literal["auto", "swap", "recompute"]
WorkerRole = Literal["prefill", "decode", "both"]

NO_PARSER = "none"  # the parser setting that leaves tool calls, or reasoning, as ordinary text
DEFAULT_CPU_KV_SHARE = 0.25  # the KV pool on CPUs, as a share of the host memory that is free after loading the model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model: its files, device and number format, and overrides that make its layers window or chunked-attention layers."""

    model: str
    dtype: Dtype = "auto"
    device: Device = "auto"
    quantization: Literal["none", "int8", "int4", "gguf"] = "none"
    max_model_len: int | None = None
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    window_pattern: str = "S"
    hybrid_kv_cache: bool = True
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pool: tokens per block, number formats by group (`kv_dtypes`), size, whether blocks of ended requests can be hit, and
    whether evicted windows are repaired. `swap_space_bytes` is the size of each rank's host tier, 0 for none. If workers share a
    GPU, `gpu_share` is this one's part of `gpu_memory_utilization`."""

    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    gpu_share: float = 1.0
    enable_prefix_caching: bool = True
    window_repair: bool = True
    swap_space_bytes: int = 0
    disk_cache: str | None = None  # a directory for the disk tier, `disk_space_bytes` large
    disk_space_bytes: int = 100 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters: `max_loras` slots at each rank, each with memory for an adapter of rank `max_lora_rank`."""

    max_loras: int = 4
    max_lora_rank: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How the scheduler fills a step. `max_waiting` bounds its queue; it refuses more requests with `Overloaded`.

    Steps with prompts should take `target_step_s` seconds at most while other requests decode or wait; None: no limit. With
    `share_step_time` clients share a step's time, too.
    `preemption_mode` says what happens to a preempted sequence's blocks if there is a host tier. If `steps_in_flight` is None, the
    worker chooses it once it knows its device (`settings.device_defaults`); a scheduler without a worker, as in tests, takes 1.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    policy: SchedulingPolicy = "fcfs"
    max_waiting: int = 1024
    steps_in_flight: int | None = None
    target_step_s: float | None = None
    share_step_time: bool = True
    preemption_mode: PreemptionMode = "auto"
    # Names of the fields that get the default of the worker's device (`settings.device_defaults`).
    by_device: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """The ranks of one worker: the processes that split every layer of its model.

    If there are several ranks, `launcher` starts them as local processes or as Ray actors. A step that takes longer than
    `step_timeout_s` counts as hung, even if there is only one rank.
    """

    size: int = 1
    launcher: Literal["processes", "ray"] = "processes"
    step_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Where spans are sent (OTLP over HTTP), and the share of requests to trace if no traceparent of the client decides."""

    endpoint: str
    sample_ratio: float = 1.0


TransferWire = Literal["auto", "nixl", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How a worker fetches cached prefixes from other workers, if `is_on`. It gives up a fetch that takes longer than `timeout_s`
    and computes the prompt instead. All fetches together have at most `max_bytes_in_flight` bytes on their way at once.

    `wire` says how bytes move: read by NIXL out of the source's memory, or by calls through Ray; auto: by NIXL where it is
    installed. Of the blocks that NIXL reads two of each group are compared with the source's, all of them if `verify` is "all".
    """

    is_on: bool = False
    timeout_s: float = 10.0
    wire: TransferWire = "auto"
    verify: Literal["sample", "all"] = "sample"
    ucx: tuple[tuple[str, str], ...] = ()  # environment variables of UCX, by which NIXL moves bytes, that the ranks set
    max_bytes_in_flight: int = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """Part `index` of `count` equal parts of a machine's cores, one for each worker on it."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one worker. `num_threads` is the number of CPU threads of each rank, which stay on the cores of `core_share`
    where the system allows it."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    ranks: RanksConfig = RanksConfig()
    lora: LoraConfig | None = None  # None: this worker takes no adapters
    role: WorkerRole = "both"
    transfer: TransferConfig = TransferConfig()
    num_threads: int | None = None
    core_share: CoreShare = CoreShare()
    tracing: TracingConfig | None = None
    log_format: LogFormat = "text"
    metrics_compat: MetricsCompat = "none"


MAX_CHOICES = 128  # the default of `LimitsConfig.max_choices`
RoutingPolicy = Literal["kv", "round_robin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits of each client and of each request; None: no limit. A client is one API key; without keys, one address."""

    requests_per_minute: int | None = None  # of each client
    concurrent_requests: int | None = None  # of each client
    concurrent_sequences: int | None = None  # of each client: prompts times choices of all its requests
    tokens_per_minute: int | None = None  # of each client, of prompts and outputs
    max_choices: int = MAX_CHOICES  # of one request: prompts times n
    get_requests_per_minute: int | None = 6000  # of each client; paths that need no key do not count
    concurrent_get_requests: int | None = 64  # of each client
    costly_get_requests_per_minute: int | None = 120  # of each client, at paths whose answers need other processes
    block_map_streams: int | None = 4  # of each client
    request_timeout_s: float | None = None  # from arrival to the last token
    body_timeout_s: float = 60.0  # for a request's body to arrive
    max_header_bytes: int = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityConfig:
    """The order of requests: the scheduling policy, and what clients may ask for: priorities from `-max_priority` to
    `max_priority`."""

    policy: SchedulingPolicy = "fcfs"
    max_priority: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverConfig:
    """What a router does with the requests of a lost worker.

    A request migrates `max_resumes` times at most. A request with `max_lost_workers` strikes, each for a worker that was lost with
    it, is stopped. A request for which there is no worker waits up to `wait_s` seconds for one.
    """

    max_resumes: int = 4
    max_lost_workers: int = 3
    wait_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of a router."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str
    model_aliases: tuple[str, ...] = ()  # further names of the model
    serve_claude_names: bool = False
    strip_billing_header: bool = True
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_api_key_file: str | None = None
    max_body_bytes: int = 8 * 2**20
    haproxy: bool = False
    routing_policy: RoutingPolicy = "kv"
    salt_by_key: bool = False
    log_prompts: bool = False
    kv_policy: str | None = None  # JSON: the KV policy of requests without one
    enable_lora: bool = False
    max_lora_rank: int = 16
    lora_modules: tuple[tuple[str, str], ...] = ()  # names and paths of the adapters that are there from the start
    tool_call_parser: str | None = None  # None: by the model's family
    reasoning_parser: str | None = None  # None: by the model's family
    enable_auto_tool_choice: bool = True
    allowed_origins: tuple[str, ...] = ()  # browsers let pages of these origins call this API; "*" allows all
    limits: LimitsConfig = LimitsConfig()
    priorities: PriorityConfig = PriorityConfig()
    failover: FailoverConfig = FailoverConfig()
    tracing: TracingConfig | None = None
    log_format: LogFormat = "text"
    metrics_compat: MetricsCompat = "none"

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return all names of the model in the API that are listed."""
        return (self.served_model_name, *self.model_aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingConfig:
    """The limits of the number of workers, and the objective of the autoscaler."""

    min_replicas: int
    max_replicas: int
    first_token_objective_s: float
    upscale_delay_s: float
    downscale_delay_s: float
