"""Settings of a worker's engine: the model, windows and chunks that turn any model into a hybrid, the KV cache and its tiers,
what the scheduler puts into a step, and the ranks that compute it."""

import re
from typing import Literal

from pydantic import BaseModel, Field

from transom_core.config import Device, Dtype, PreemptionMode, SchedulingPolicy
from transom_core.errors import ConfigError


class ModelSettings(BaseModel):
    """The model, its device and its number format."""

    model: str = Field(
        description="Folder of safetensors, a .gguf file, a Hugging Face id (org/name or org/name@revision), or smollm2 (the demo)."
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="A name of the model in the API, MODEL if unset. The first one is in metrics and logs."
    )
    serve_claude_names: bool = Field(
        False,
        description="Model names that begin with claude- stand for the served model too, for clients with fixed names.",
    )
    dtype: Dtype = Field(
        "auto",
        description="Number format of weights and activations; auto: float32 for a float32 checkpoint, else bfloat16.",
    )
    device: Device = Field("auto", description="auto takes CUDA where torch finds a GPU, else the CPU.")
    quantization: Literal["none", "int8", "int4", "gguf"] = Field(
        "none",
        description="On CPUs. int8, int4: the weights of linear layers have 8 or 4 bits, with a scale for every 32 columns; "
        "gguf: tensors that a GGUF file has in Q8_0, Q4_0 or Q4_1 stay so.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt and output together, in tokens; the model's own limit if unset, or less where the "
        "KV pool is smaller.",
    )
    seed: int | None = Field(None, description="Makes requests without a seed of their own repeatable.")
    enforce_eager: bool = Field(False, description="On CUDA: launch every kernel, without CUDA graphs.")


class HybridSettings(BaseModel):
    """Windows and chunks for layers of a model that was trained without them."""

    window: int | None = Field(
        None, ge=1, description="Turns layers into sliding-window layers of this many tokens, the query included."
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

    def check_pattern(self) -> None:
        """Raise ConfigError if pattern, window, sinks and chunk do not fit together."""
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


class CacheSettings(BaseModel):
    """The KV pool, the prefix cache, the host tier and the disk tier."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block and per hash block of the prefix cache.")
    kv_cache_dtype: str = Field(
        "auto",
        description="Number format of the KV cache: auto (the model's), bfloat16, float16, float32, fp8, int8 or int4; or of each "
        "KV group, by kind or name: window=bfloat16,full=int8.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Size of each rank's KV pool. If unset: on GPUs what --gpu-memory-utilization leaves, on CPUs a "
        "quarter of the free memory, and no more than --max-num-seqs sequences can use.",
    )
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of GPU memory for weights, activations and the KV pool."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of shared prefixes.")
    window_repair: bool = Field(
        True,
        description="Where only the window blocks of a prefix are evicted, compute only the tokens that restore the "
        "window.",
    )
    hybrid_kv_cache: bool = Field(
        True, description="Off: every layer keeps the KV of all tokens; the results are equal and take more memory."
    )
    swap_space: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Memory of each rank's host tier (docs/kv_tiers.md), for evicted KV blocks; 0: no host tier.",
    )
    disk_cache: str | None = Field(
        None,
        description="Directory of the disk tier, which keeps KV blocks over restarts for all workers of the host. "
        "Its files hold what requests contained. If unset: no disk tier.",
    )
    disk_space: int = Field(
        100 * 2**30,
        ge=1,
        description="Space for all files in --disk-cache together; those not used for longest are removed first.",
    )
    kv_policy: str | None = Field(
        None,
        description="KV policy of requests that send none, as JSON: which keys and values full-attention layers keep, such "
        'as {"type": "window", "sinks": 4, "window": 1024}.',
    )

    def check_disk(self) -> None:
        """Raise ConfigError if the disk tier has an empty directory name, or nothing to keep because prefix caching is off."""
        if self.disk_cache is None:
            return
        if not self.disk_cache.strip():
            raise ConfigError("--disk-cache is empty; give a directory, or leave it out for no disk tier.")
        if not self.enable_prefix_caching:
            raise ConfigError("--disk-cache keeps cached prefixes; it needs --enable-prefix-caching.")


class BatchingSettings(BaseModel):
    """What the scheduler puts into a step, and in which order requests are served."""

    max_num_seqs: int = Field(
        64,
        ge=1,
        description="Most sequences that one worker runs at once. If unset, on GPUs: 256 from 70 GiB of memory, 128 below.",
    )
    max_num_batched_tokens: int = Field(
        1024,
        ge=1,
        description="Most tokens that one step computes (chunked prefill). If unset, on GPUs: 8192 from 70 GiB of memory, "
        "2048 below.",
    )
    target_step_s: float | None = Field(
        None,
        ge=0,
        description="While other requests decode or wait, a step computes only the prompt tokens that take about this "
        "many seconds; 0: as --max-num-batched-tokens allows. If unset: 0.2 for the workers of a server on CPUs, else 0.",
    )
    share_step_time: bool = Field(
        True,
        description="Clients share the time of a worker's steps: one with many or long requests makes steps at most "
        "about 1.35 times as long as usual, which costs throughput.",
    )
    max_waiting: int = Field(
        1024,
        ge=0,
        description="Most requests that wait at one worker, shared among clients; a request that all workers refuse "
        "gets 503.",
    )
    scheduling_policy: SchedulingPolicy = Field(
        "fcfs",
        description="priority: requests with lower numbers run first; a priority of 1 more counts as much as having "
        "arrived 30 s later.",
    )
    max_priority: int = Field(4, ge=0, le=1000, description="Clients may ask for priorities from -N to N.")
    steps_in_flight: int | None = Field(
        None,
        ge=1,
        le=2,
        description="Steps that are planned ahead of their results; if unset 2 on GPUs and with several ranks, else 1.",
    )
    preemption_mode: PreemptionMode = Field(
        "auto",
        description="What happens to the KV of a preempted request: swap moves it to the host tier, recompute drops "
        "it; auto chooses what takes less time.",
    )


class RanksSettings(BaseModel):
    """The ranks of each worker."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks of each worker: processes that split every layer, with one GPU each where there are GPUs; "
        "heads need not divide evenly.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each rank. If unset: on GPUs all cores of the machine, on CPUs an equal share of "
        "them for each rank of each worker there.",
    )
    step_timeout_s: float = Field(
        300.0,
        gt=0,
        description="A step that takes longer counts as hung: its requests migrate, and the worker's process or its "
        "ranks start again.",
    )
