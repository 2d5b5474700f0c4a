"""Settings as users give them: one flat table of names.

`transom serve` flags, the Serve YAML and `LLM(...)` keywords fill it: the same names everywhere, those that `vllm serve` users
know. It is checked once and resolved into `config.EngineConfig` and `config.ServerConfig`. A name or value that is known but not
supported yet is refused with a message, never ignored.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from transom_worker.byte_sizes import parse_bytes
from transom_worker.config import (
    AutoscalingConfig,
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    FailoverConfig,
    LimitsConfig,
    LogFormat,
    ModelConfig,
    RanksConfig,
    RoutingPolicy,
    SchedulerConfig,
    ServerConfig,
    TracingConfig,
)
from transom_worker.errors import ConfigError

NOT_YET: dict[str, tuple[object, str]] = {
    # setting: (the only value supported so far, what to do)
    "kv_cache_dtype": ("auto", "keep the cache in the model's dtype"),
    "swap_space": (0.0, "there is no host tier yet"),
    "preemption_mode": ("recompute", "preempted requests are recomputed"),
}


class Settings(BaseModel):
    """Every setting of Transom, flat. See the module's docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(description="Folder of safetensors, a .gguf file, a Hugging Face id, or smollm2 (the demo).")
    served_model_name: str | None = Field(None, description="Name in the API; the model's own name if unset.")
    dtype: Dtype = Field(
        "auto",
        description="Weights and activations; auto: bfloat16 (float32 for a float32 checkpoint).",
    )
    device: Device = Field("auto", description="auto takes CUDA where there is one.")
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8: weights and activations of linear layers, on CPUs."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt + answer; the model's own limit if unset."
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block and per unit of prefix hashing.")
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="Bytes of the KV pool, or such as 512MiB, 4GiB.")
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of GPU memory for weights, activations and KV."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse KV of shared prefixes.")
    window_repair: bool = Field(
        True, description="Where windows are evicted and full layers are not, compute only the tail that restores them."
    )
    hybrid_kv_cache: bool = Field(True, description="Off: every layer keeps full length; same results, more memory.")
    enforce_eager: bool = Field(False, description="On CUDA: launch every kernel, replay no CUDA graphs.")
    window: int | None = Field(
        None,
        ge=1,
        description="Makes layers sliding-window layers of this many tokens, the query included.",
    )
    sinks: int = Field(0, ge=0, description="First tokens that window layers keep as well.")
    chunk: int | None = Field(
        None,
        ge=1,
        description="Makes layers chunked-local layers, which see the tokens since the last multiple of this many.",
    )
    window_pattern: str = Field(
        "S", description="Repeated over the layers: S window (needs --window), C chunked (needs --chunk), F full."
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences that run at once.")
    max_num_batched_tokens: int = Field(
        1024, ge=1, description="Tokens computed per step; longer prompts go in chunks."
    )
    max_waiting: int = Field(1024, ge=0, description="Waiting requests; more are refused with 503.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="priority: lower numbers first; each step of priority counts as much as 30 s of waiting."
    )
    steps_in_flight: int | None = Field(
        None, ge=1, le=2, description="Plans ahead of results; if unset 2 with --device cuda or several ranks, else 1."
    )
    seed: int | None = Field(None, description="Makes unseeded requests repeatable.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of a worker; all cores if unset.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks of each worker, a GPU each; even or uneven.")
    step_timeout_s: float = Field(
        300.0, gt=0, description="A step that takes longer counts as a rank that hangs: all ranks are started again."
    )
    replicas: int = Field(1, ge=1, description="Workers; with --max-replicas those to start with.")
    min_replicas: int | None = Field(None, ge=0, description="Workers that stay when nothing is asked; 1 if unset.")
    max_replicas: int | None = Field(None, ge=1, description="Makes the number of workers follow the load, up to this.")
    first_token_objective_s: float = Field(2.0, gt=0, description="Workers are added while first tokens take longer.")
    upscale_delay_s: float = Field(10.0, ge=0, description="How long more workers must be wanted.")
    downscale_delay_s: float = Field(300.0, ge=0, description="How long fewer workers must be wanted.")
    router_replicas: int = Field(1, ge=1, description="Routers; each knows all workers.")
    routing_policy: RoutingPolicy = Field(
        "kv",
        description="kv: least expected cost, cached prefixes counted; or least_tokens, round_robin, power_of_two.",
    )
    max_resumes: int = Field(4, ge=0, description="How often an answer goes on elsewhere when its worker is lost.")
    worker_wait_s: float = Field(
        60.0, gt=0, description="How long a request waits, connection open, while no worker can take it."
    )
    kv_cache_dtype: str = "auto"
    swap_space: float = Field(0.0, ge=0)
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = Field((), description="Clients must send one of these as a bearer token.")
    api_key_file: str | None = Field(
        None, description="A file with one such key a line; lines with # in front do not count."
    )
    admin_api_key_file: str | None = Field(
        None, description="A file of keys that alone open what shows all clients together: the block map and /metrics."
    )
    salt_by_key: bool = Field(
        False, description="Clients with different API keys share no cached prefixes, so that none can time another's."
    )
    requests_per_minute: int | None = Field(None, ge=1, description="Of each API key; more are answered 429.")
    concurrent_requests: int | None = Field(None, ge=1, description="Of each API key at once; more are answered 429.")
    request_timeout_s: float | None = Field(None, gt=0, description="Requests that take longer end with an error.")
    max_header_bytes: int = Field(64 * 2**10, ge=1024, description="Larger request headers are refused with 431.")
    log_prompts: bool = Field(False, description="Prompts and answers may show in logs.")
    log_format: LogFormat = Field("text", description="json: an object a line, and a line for each finished request.")
    otlp_traces_endpoint: str | None = Field(
        None, description="Sends OpenTelemetry spans there, such as http://127.0.0.1:4318/v1/traces."
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests to trace where the client's traceparent does not say."
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="Larger request bodies are refused with 413.")
    haproxy: bool = Field(False, description="Production token path: HAProxy and Serve's throughput settings.")

    @classmethod
    def parse(cls, **values: Any) -> Settings:
        """Check settings given by name.

        Raises:
            ConfigError: an unknown name, a wrong value, or one that is not supported yet; the message names it.
        """
        memory = values.get("kv_cache_memory_bytes")
        if isinstance(memory, str):
            values["kv_cache_memory_bytes"] = parse_bytes(memory, name="kv_cache_memory_bytes")
        if isinstance(values.get("api_key"), str):
            values["api_key"] = (values["api_key"],)
        try:
            settings = cls(**values)
        except ValidationError as error:
            problems = "; ".join(_describe(problem) for problem in error.errors())
            raise ConfigError(f"Wrong settings: {problems}.") from None
        settings._check_supported()
        return settings

    def _check_supported(self) -> None:
        for name, (supported, advice) in NOT_YET.items():
            value = getattr(self, name)
            if value != supported:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} {value} is not supported yet; {advice} ({flag} {supported}).")
        self._check_pattern()
        self._check_replicas()
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint is {endpoint!r}; give the http:// or https:// URL of an OTLP receiver, such as "
                "http://127.0.0.1:4318/v1/traces."
            )

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

    def engine_config(self) -> EngineConfig:
        """The worker's part. `steps_in_flight` unset becomes 2 on an explicit cuda device and with several ranks, else 1."""
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
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
                window_repair=self.window_repair,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                policy=self.scheduling_policy,
                max_waiting=self.max_waiting,
                steps_in_flight=self.steps_in_flight
                or (2 if self.device == "cuda" or self.tensor_parallel_size > 1 else 1),
            ),
            ranks=RanksConfig(size=self.tensor_parallel_size, step_timeout_s=self.step_timeout_s),
            num_threads=self.num_threads,
            tracing=self._tracing_config(),
            log_format=self.log_format,
        )

    def _tracing_config(self) -> TracingConfig | None:
        if self.otlp_traces_endpoint is None:
            return None
        return TracingConfig(endpoint=self.otlp_traces_endpoint, sample_ratio=self.trace_sample_ratio)

    def autoscaling_config(self) -> AutoscalingConfig | None:
        """The autoscaler's part; None where the number of workers is fixed."""
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
        """The router's part."""
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
            limits=LimitsConfig(
                requests_per_minute=self.requests_per_minute,
                concurrent_requests=self.concurrent_requests,
                request_timeout_s=self.request_timeout_s,
                max_header_bytes=self.max_header_bytes,
            ),
            failover=FailoverConfig(max_resumes=self.max_resumes, wait_s=self.worker_wait_s),
            tracing=self._tracing_config(),
            log_format=self.log_format,
        )


def _describe(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{name} is not a setting of Transom"
    return f"{name} is {problem['input']!r}: {problem['msg']}"
