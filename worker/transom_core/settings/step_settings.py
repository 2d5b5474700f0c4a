"""Settings of a worker's steps: what the scheduler puts into a step, and the ranks that compute it."""

from __future__ import annotations

from pydantic import BaseModel, Field

from transom_core.config import PreemptionMode, SchedulingPolicy


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
        description="Clients that share a worker share the time of its steps: one with many or long requests makes steps "
        "at most about 1.5 times as long as usual. The price is throughput while a large client runs beside a small one.",
    )
    max_waiting: int = Field(
        1024,
        ge=0,
        description="Most requests that wait at one worker; if every worker refuses more, the client gets 503. Each client "
        "has its share of these places, even if others have taken them.",
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
        description="Clients may ask for priorities from -N to N; a request of priority p is overtaken only by requests "
        "that arrive within 30 (p + N) seconds after it.",
    )
    steps_in_flight: int | None = Field(
        None,
        ge=1,
        le=2,
        description="Steps that are planned ahead of their results; if unset 2 on GPUs and with several ranks, else 1.",
    )
    preemption_mode: PreemptionMode = Field(
        "auto",
        description="What happens to the KV of a preempted request: swap moves it to the host tier, recompute drops it; "
        "auto chooses what takes less time, and recompute without a host tier.",
    )


class RanksSettings(BaseModel):
    """The ranks of each worker."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks of each worker: processes that split every layer, with one GPU each where there are GPUs; "
        "heads need not divide evenly.",
    )
    rank_process: bool | None = Field(
        None,
        description="Whether a worker's only rank has a process of its own, so that planning steps and sending answers do not "
        "delay launches; if unset, on GPUs. Several ranks always have.",
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
        description="A step that takes longer, in seconds, counts as hung: its requests migrate, and the worker's process or its "
        "ranks start again.",
    )
