"""`Settings`: every setting that a user can give, in one flat table of names.

Three sources fill it, with equal names: the flags of `transom serve`, the arguments in a Ray Serve YAML file, and the keywords
of `LLM(...)`. The names are those of `vllm serve` where it has one. `Settings.parse` checks them once; `engine_config`,
`server_config` and `autoscaling_config` resolve them into the frozen configs that the parts of the system receive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from transom_core.config import (
    NO_PARSER,
    AutoscalingConfig,
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    FailoverConfig,
    LimitsConfig,
    LogFormat,
    ModelConfig,
    PreemptionMode,
    PriorityConfig,
    RanksConfig,
    RoutingPolicy,
    SchedulerConfig,
    SchedulingPolicy,
    ServerConfig,
    TracingConfig,
    TransferConfig,
    WorkerRole,
)
from transom_core.contract.kv_policy import kv_policy_from_json
from transom_core.errors import ConfigError, RequestError
from transom_core.settings.byte_sizes import parse_bytes
from transom_core.settings.kv_dtypes import KvDtypes, as_text

DISK_HOST_BYTES = 1 << 30  # of the host tier, where a disk tier or a role is asked for and no host tier


class WorkerGroup(BaseModel):
    """A further group of workers of the same model: what differs from the other workers. Its number of workers is fixed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    role: WorkerRole = "both"
    replicas: int = Field(1, ge=1)
    tensor_parallel_size: int = Field(1, ge=1)
    kv_cache_memory_bytes: int | str | None = None
    swap_space: float | str | None = None
    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    num_threads: int | None = Field(None, ge=1)

    @classmethod
    def read(cls, given: object) -> object:
        """Return what the command line gives, such as `role=prefill,replicas=2`, by name; anything else as it is."""
        if not isinstance(given, str):
            return given
        pairs = [part.partition("=") for part in given.split(",")]
        if unclear := [name for name, equals, _ in pairs if not equals]:
            raise ConfigError(
                f"--worker-group is {given!r}, and {unclear[0]!r} has no value; give names and values, such as "
                "role=prefill,replicas=2."
            )
        return {name.strip(): value.strip() for name, _, value in pairs}


class Settings(BaseModel):
    """Every setting of Transom, with its default, its limits and its description; docs/flags.md is made from these."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(description="Folder of safetensors, a .gguf file, a Hugging Face id, or smollm2 (the demo).")
    served_model_name: str | None = Field(None, description="The model's name in the API; the value of MODEL if unset.")
    dtype: Dtype = Field(
        "auto",
        description="Number format of weights and activations; auto: float32 for a float32 checkpoint, else bfloat16.",
    )
    device: Device = Field("auto", description="auto takes CUDA where torch finds a GPU, else the CPU.")
    quantization: Literal["none", "int8", "int4", "gguf"] = Field(
        "none",
        description="int8, int4: the weights of linear layers have 8 or 4 bits, with a scale for every 32 columns; gguf: "
        "tensors that a GGUF file has in Q8_0, Q4_0 or Q4_1 stay so, in place of being dequantised. On CPUs.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt and output together, in tokens; the model's own limit if unset, or less where the "
        "KV pool is smaller.",
    )
    kv_cache_dtype: str = Field(
        "auto",
        description="Number format of the KV cache: auto (the model's), bfloat16, float16, float32, fp8, int8 or int4; or of each "
        "KV group, by kind or name: window=bfloat16,full=int8.",
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block and per hash block of the prefix cache.")
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Size of each rank's KV pool, such as 512MiB or 4GiB. If unset: on GPUs what "
        "--gpu-memory-utilization leaves, on CPUs a quarter of the free memory, and no more than "
        "--max-num-seqs sequences can use.",
    )
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of GPU memory for weights, activations and the KV pool."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of shared prefixes.")
    window_repair: bool = Field(
        True,
        description="Where a prefix's window blocks are evicted and its full-attention blocks are not, compute only the "
        "tokens that restore the window.",
    )
    kv_policy: str | None = Field(
        None,
        description="KV policy of requests that send none, as JSON: which keys and values full-attention layers keep, such as "
        '{"type": "window", "sinks": 4, "window": 1024}. A request with kv_policy {"type": "full"} keeps everything.',
    )
    hybrid_kv_cache: bool = Field(
        True, description="Off: every layer keeps the KV of all tokens; the results are equal and take more memory."
    )
    enforce_eager: bool = Field(False, description="On CUDA: launch every kernel, without CUDA graphs.")
    window: int | None = Field(
        None,
        ge=1,
        description="Turns layers into sliding-window layers of this many tokens, the query included.",
    )
    sinks: int = Field(
        0, ge=0, description="Sink tokens: the first tokens of a sequence, which layers with a window keep as well."
    )
    chunk: int | None = Field(
        None,
        ge=1,
        description="Turns layers into chunked-attention layers, whose queries see the tokens since the last multiple "
        "of this many.",
    )
    window_pattern: str = Field(
        "S",
        description="Repeated over the layers: S sliding window (needs --window), C chunked attention (needs --chunk), "
        "F full attention.",
    )
    max_num_seqs: int = Field(64, ge=1, description="Most sequences that one worker runs at once.")
    max_num_batched_tokens: int = Field(
        1024,
        ge=1,
        description="Most tokens that one step computes; longer prompts take several steps (chunked prefill).",
    )
    target_step_s: float | None = Field(
        None,
        ge=0,
        description="While other requests decode or wait, a step computes only as many prompt tokens as take about so "
        "many seconds; 0: as --max-num-batched-tokens allows. If unset: 0.2 for the workers of a server on CPUs, else 0.",
    )
    max_waiting: int = Field(
        1024,
        ge=0,
        description="Most requests that wait at one worker; it refuses more, and the client gets 503 where every worker "
        "does.",
    )
    scheduling_policy: SchedulingPolicy = Field(
        "fcfs",
        description="priority: requests with lower numbers run first; a priority of 1 more counts as much as having "
        "arrived 30 s later.",
    )
    max_priority: int = Field(
        4,
        ge=0,
        le=1000,
        description="Clients may ask for priorities from -N to N, others are refused with 400; a request of priority p is "
        "overtaken only by requests that arrive within 30 (p + N) seconds after it.",
    )
    steps_in_flight: int | None = Field(
        None,
        ge=1,
        le=2,
        description="Steps that are planned ahead of their results; if unset 2 on GPUs and with several ranks, else 1.",
    )
    seed: int | None = Field(None, description="Makes requests without a seed of their own repeatable.")
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each rank. If unset: on GPUs all cores of the machine, on CPUs an equal share of "
        "them for each rank of each worker there.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks of each worker: processes that split every layer, with one GPU each where there are GPUs; "
        "heads need not divide evenly.",
    )
    step_timeout_s: float = Field(
        300.0,
        gt=0,
        description="A step that takes longer, in seconds, counts as hung: its requests migrate, and the worker's process or its "
        "ranks start again.",
    )
    replicas: int = Field(1, ge=1, description="Number of workers; with --max-replicas the number at start.")
    min_replicas: int | None = Field(
        None, ge=0, description="Least number of workers while the cluster is idle, with --max-replicas; 1 if unset."
    )
    max_replicas: int | None = Field(
        None, ge=1, description="Most workers: the autoscaler changes their number with the load."
    )
    first_token_objective_s: float = Field(
        2.0, gt=0, description="The autoscaler adds workers while requests would wait longer for their first token."
    )
    upscale_delay_s: float = Field(
        10.0, ge=0, description="How long the autoscaler must want more workers before it adds them."
    )
    downscale_delay_s: float = Field(
        300.0, ge=0, description="How long the autoscaler must want fewer workers before it removes any."
    )
    router_replicas: int = Field(1, ge=1, description="Number of routers; each one knows all workers.")
    routing_policy: RoutingPolicy = Field(
        "kv",
        description="kv: the worker with the least expected cost, cached prefixes counted; or least_tokens, "
        "round_robin, power_of_two.",
    )
    max_resumes: int = Field(
        4, ge=0, description="How often a request may migrate to another worker when its worker is lost."
    )
    max_lost_workers: int = Field(
        3,
        ge=1,
        description="How many workers may be lost to one request, by all that is known, before it is stopped as a poison "
        "request: see docs/failover.md.",
    )
    worker_wait_s: float = Field(
        60.0, gt=0, description="How long a request waits, connection open, while no worker can take it."
    )
    role: WorkerRole = Field(
        "both",
        description="What the workers are for. prefill: they compute prompts and first tokens, and workers of another role "
        "continue and fetch the KV; decode: they continue, and compute short prompts; both. Where no worker of the other role "
        "is there, every worker does both.",
    )
    worker_group: tuple[WorkerGroup, ...] = Field(
        (),
        description="A further group of workers, such as role=prefill,replicas=2,tensor_parallel_size=4; may be given several "
        "times. Besides these names: kv_cache_memory_bytes, swap_space, max_num_seqs, max_num_batched_tokens, num_threads.",
    )
    kv_transfer: bool = Field(
        True,
        description="Workers with a host tier (--swap-space) fetch cached prefixes from each other where that is cheaper than "
        "computing them.",
    )
    kv_transfer_timeout_s: float = Field(
        10.0,
        gt=0,
        description="How long a request waits for a prefix from another worker, in seconds, before its prompt is computed.",
    )
    swap_space: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Memory of each rank's host tier, in GiB or with a unit such as 512MiB: KV blocks that are evicted from the "
        "KV pool go there, and come back when a prompt hits them; 0: no host tier. See docs/kv_cache.md.",
    )
    disk_cache: str | None = Field(
        None,
        description="Directory for KV blocks that leave the memory: prompts find them there also after a restart, and workers of "
        "one host share them. Its files hold what requests contained, and only the user that runs the workers can read them. If "
        "unset: no disk tier.",
    )
    disk_space: int = Field(
        100 * 2**30,
        ge=1,
        description="Space for all files in --disk-cache together, such as 100GiB; those not used for longest are removed first.",
    )
    preemption_mode: PreemptionMode = Field(
        "auto",
        description="What happens to the KV of a request that is preempted: swap moves it to the host tier, recompute drops it; "
        "auto chooses what takes less time, and without a host tier recompute.",
    )
    tool_call_parser: str | None = Field(
        None,
        description="The markup of the model's tool calls, by vLLM's names, such as hermes, llama3_json, mistral or openai; "
        "none: calls are ordinary text. If unset: by the model's type and chat template; the log says which.",
    )
    enable_auto_tool_choice: bool = Field(
        True,
        description="The model may decide whether it calls a tool (tool_choice auto, the default of requests with tools). Off: "
        "such requests are refused with 400.",
    )
    reasoning_parser: str | None = Field(
        None,
        description="The markup of the model's reasoning, by vLLM's names, such as qwen3, deepseek_r1 or openai_gptoss; "
        "none: it is ordinary text. If unset: by the model's type and chat template; the log says which.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = Field((), description="Clients must send one of these as a bearer token.")
    api_key_file: str | None = Field(
        None, description="A file with one such key per line; lines that begin with # are comments."
    )
    admin_api_key_file: str | None = Field(
        None,
        description="A file of admin keys. Where it is given, only they open the routes that show all clients together: "
        "the block map and /metrics.",
    )
    salt_by_key: bool = Field(
        False,
        description="Clients with different API keys share no cached prefixes, so that no client can time another's.",
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Requests of each API key per minute; more are answered with 429."
    )
    concurrent_requests: int | None = Field(
        None, ge=1, description="Requests of each API key at once; more are answered with 429."
    )
    get_requests_per_minute: int = Field(
        6000,
        ge=1,
        description="GET requests of each API key per minute (metrics, models, the block map); more are answered with 429.",
    )
    concurrent_get_requests: int = Field(
        64, ge=1, description="GET requests of each API key at once; more are answered with 429."
    )
    block_map_streams: int = Field(
        4,
        ge=1,
        description="Open streams of the block map of each API key and router; more are answered with 429. A worker serves 16.",
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="Requests that take longer, from arrival to the last token, end with an error."
    )
    max_header_bytes: int = Field(64 * 2**10, ge=1024, description="Larger request headers are refused with 431.")
    log_prompts: bool = Field(
        False, description="Log every prompt, and the messages of internal errors, which may quote prompts and outputs."
    )
    log_format: LogFormat = Field(
        "text", description="json: one JSON object per line, and one line for each request that has ended."
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="Send OpenTelemetry spans there, such as http://127.0.0.1:4318/v1/traces."
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests to trace where the client's traceparent header does not say."
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="An origin whose web pages may call this API from a browser (CORS), such as https://chat.example.com; * allows "
        "all. May be given several times. If unset: none.",
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="Larger request bodies are refused with 413.")
    haproxy: bool = Field(False, description="Serve over HAProxy, with Ray Serve's settings for throughput.")

    @classmethod
    def parse(cls, **values: Any) -> Settings:
        """Check settings given by name.

        Raises:
            ConfigError: an unknown name, a wrong value, or one that is not supported yet; the message names it.
        """
        for name in ("kv_cache_memory_bytes", "disk_space"):
            if isinstance(values.get(name), str):
                values[name] = parse_bytes(values[name], name=name)
        if isinstance(values.get("swap_space"), str):
            values["swap_space"] = gibibytes(values["swap_space"], name="swap_space")
        if isinstance(values.get("kv_cache_dtype"), Mapping):
            values["kv_cache_dtype"] = as_text(values["kv_cache_dtype"])
        if values.get("worker_group"):
            values["worker_group"] = tuple(map(WorkerGroup.read, values["worker_group"]))
        if isinstance(values.get("api_key"), str):
            values["api_key"] = (values["api_key"],)
        if values.get("allowed_origins"):
            values["allowed_origins"] = read_origins(values["allowed_origins"])
        try:
            settings = cls(**values)
        except ValidationError as error:
            problems = "; ".join(_describe(problem) for problem in error.errors())
            raise ConfigError(f"Wrong settings: {problems}.") from None
        settings._check_together()
        return settings

    def _check_together(self) -> None:
        KvDtypes.parse(self.kv_cache_dtype)
        self._check_pattern()
        self._check_replicas()
        self.groups()
        self._check_disk()
        if self.preemption_mode == "swap" and not self._swap_space_bytes():
            raise ConfigError(
                "--preemption-mode swap moves requests to the host tier, and there is none; give --swap-space, or leave it out."
            )
        if self.kv_policy is not None:
            kv_policy_from_json(self.kv_policy)
        self._check_parsers()
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint is {endpoint!r}; give the http:// or https:// URL of an OTLP receiver, such as "
                "http://127.0.0.1:4318/v1/traces."
            )

    def _check_disk(self) -> None:
        if self.disk_cache is None:
            return
        if not self.disk_cache.strip():
            raise ConfigError("--disk-cache is empty; give a directory, or leave it out for no disk tier.")
        if not self.enable_prefix_caching:
            raise ConfigError("--disk-cache keeps cached prefixes; it needs --enable-prefix-caching.")

    def _check_parsers(self) -> None:
        given = [None if one == NO_PARSER else one for one in (self.tool_call_parser, self.reasoning_parser)]
        if given == [None, None]:
            return
        from transom_core.text.markup.formats import answer_format

        try:
            answer_format(*given)
        except RequestError as error:
            raise ConfigError(f"--tool-call-parser, --reasoning-parser: {error}") from None

    def _check_replicas(self) -> None:
        least, most = self.min_replicas, self.max_replicas
        if most is None:
            if least is not None:
                raise ConfigError(
                    f"--min-replicas is {least}; it needs --max-replicas, without which --replicas is fixed."
                )
        elif (1 if least is None else least) > most or self.replicas > most:
            raise ConfigError(
                f"--max-replicas is {most}, --min-replicas {1 if least is None else least} and --replicas {self.replicas}; "
                "the largest must be --max-replicas."
            )

    def _check_pattern(self) -> None:
        pattern = self.window_pattern
        if not re.fullmatch(r"[SCF]+", pattern):
            raise ConfigError(
                f"--window-pattern is {pattern!r}; use letters S (window), C (chunked) and F (full), such as SSF."
            )
        if (self.chunk is None) != ("C" not in pattern):
            raise ConfigError(
                f"--chunk is {self.chunk} and --window-pattern {pattern!r}; layers with the letter C take --chunk: give both, "
                "such as --chunk 8192 --window-pattern CCCF, or neither."
            )
        needs_window = self.sinks or ("S" in pattern if self.chunk else pattern != "S")
        if self.window is None and needs_window:
            raise ConfigError("--sinks and --window-pattern need --window; give a window in tokens.")

    def groups(self) -> list[Settings]:
        """The settings of the further groups of workers, each as if it were the only one.

        Raises:
            ConfigError: a group's values do not fit.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set} | {"worker_group": ()}
        own |= {"min_replicas": None, "max_replicas": None}
        given = [{name: getattr(group, name) for name in group.model_fields_set} for group in self.worker_group]
        return [
            Settings.parse(**{**own, "tensor_parallel_size": 1, "role": "both", "replicas": 1, **one}) for one in given
        ]

    def engine_config(self) -> EngineConfig:
        """The settings of one worker."""
        return EngineConfig(
            model=ModelConfig(
                model=self.model,
                dtype=self.dtype,
                device=self.device,
                quantization=self.quantization,
                max_model_len=self.max_model_len,
                window=self.window,
                sinks=self.sinks,
                chunk=self.chunk,
                window_pattern=self.window_pattern,
                hybrid_kv_cache=self.hybrid_kv_cache,
                enforce_eager=self.enforce_eager,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                kv_cache_dtype=self.kv_cache_dtype,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
                window_repair=self.window_repair,
                swap_space_bytes=self._swap_space_bytes(),
                disk_cache=self.disk_cache,
                disk_space_bytes=self.disk_space,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                policy=self.scheduling_policy,
                max_waiting=self.max_waiting,
                steps_in_flight=self.steps_in_flight,
                target_step_s=self.target_step_s or None,
                preemption_mode=self.preemption_mode,
            ),
            ranks=RanksConfig(size=self.tensor_parallel_size, step_timeout_s=self.step_timeout_s),
            role=self.role,
            transfer=TransferConfig(is_on=self.kv_transfer, timeout_s=self.kv_transfer_timeout_s),
            num_threads=self.num_threads,
            tracing=self._tracing_config(),
            log_format=self.log_format,
        )

    def _swap_space_bytes(self) -> int:
        """The size of the host tier. What comes from the disk or from other workers passes through it."""
        needs_one = self.disk_cache or (self.role != "both" and self.kv_transfer)
        return int(self.swap_space * 2**30) or (DISK_HOST_BYTES if needs_one else 0)

    def _tracing_config(self) -> TracingConfig | None:
        if self.otlp_traces_endpoint is None:
            return None
        return TracingConfig(endpoint=self.otlp_traces_endpoint, sample_ratio=self.trace_sample_ratio)

    def autoscaling_config(self) -> AutoscalingConfig | None:
        """The settings of the autoscaler; None where the number of workers is fixed."""
        if self.max_replicas is None:
            return None
        return AutoscalingConfig(
            min_replicas=1 if self.min_replicas is None else self.min_replicas,
            max_replicas=self.max_replicas,
            first_token_objective_s=self.first_token_objective_s,
            upscale_delay_s=self.upscale_delay_s,
            downscale_delay_s=self.downscale_delay_s,
        )

    def server_config(self) -> ServerConfig:
        """The settings of a router."""
        return ServerConfig(
            host=self.host,
            port=self.port,
            served_model_name=self.served_model_name or self.model,
            api_keys=self.api_key,
            api_key_file=self.api_key_file,
            admin_api_key_file=self.admin_api_key_file,
            max_body_bytes=self.max_body_bytes,
            haproxy=self.haproxy,
            routing_policy=self.routing_policy,
            salt_by_key=self.salt_by_key,
            log_prompts=self.log_prompts,
            kv_policy=self.kv_policy,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            enable_auto_tool_choice=self.enable_auto_tool_choice,
            allowed_origins=self.allowed_origins,
            limits=LimitsConfig(
                requests_per_minute=self.requests_per_minute,
                concurrent_requests=self.concurrent_requests,
                get_requests_per_minute=self.get_requests_per_minute,
                concurrent_get_requests=self.concurrent_get_requests,
                block_map_streams=self.block_map_streams,
                request_timeout_s=self.request_timeout_s,
                max_header_bytes=self.max_header_bytes,
            ),
            priorities=PriorityConfig(policy=self.scheduling_policy, max_priority=self.max_priority),
            failover=FailoverConfig(
                max_resumes=self.max_resumes, max_lost_workers=self.max_lost_workers, wait_s=self.worker_wait_s
            ),
            tracing=self._tracing_config(),
            log_format=self.log_format,
        )


def read_origins(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return origins that are given as texts, or as vLLM's flag has them: as a list in JSON.

    Raises:
        ConfigError: one is neither * nor an origin.
    """
    origins: list[str] = []
    for one in (given,) if isinstance(given, str) else given:
        try:
            listed = json.loads(one) if one.startswith("[") else [one]
        except ValueError:
            listed = [one]
        origins += map(str, listed)
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#\s]+", origin):
            raise ConfigError(
                f"--allowed-origins has {origin!r}; give an origin, which has a scheme, a host and perhaps a port, and nothing "
                "behind them, such as https://chat.example.com; or * for all."
            )
    return tuple(origins)


def gibibytes(text: str, *, name: str) -> float:
    """Return a size in GiB: a number without a unit counts GiB, as in vLLM."""
    try:
        return float(text)
    except ValueError:
        return parse_bytes(text, name=name) / 2**30


def _describe(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{name} is not a setting of Transom"
    return f"{name} is {problem['input']!r}: {problem['msg']}"
