"""The cases of the cache simulation, with vLLM 0.32's published hit shares (its default, and with dense retention)."""

from __future__ import annotations

from dataclasses import dataclass

GPT_OSS = "gpt-oss-20b"
GEMMA = "gemma-4-31b-like"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One replay: what, on which geometry, in how much memory."""

    model: str
    memory: str
    workload: str | None = None
    trace: str | None = None
    arrivals: str = "sequential"
    host_memory: str = "0"
    skip: int = 0  # requests that are left out
    limit: int | None = None  # requests after those; None: all
    vllm_default: float | None = None
    vllm_dense: float | None = None

    @property
    def name(self) -> str:
        """Words for a table's first column."""
        overlapping = ", overlapping" if self.arrivals == "recorded" else ""
        host = "" if self.host_memory == "0" else f" + {self.host_memory} host"
        part = "" if self.limit is None else f", requests {self.skip} to {self.skip + self.limit - 1}"
        return f"{self.workload or self.trace}, {self.model}, {self.memory}{host}{overlapping}{part}"


def _sessions() -> tuple[Case, ...]:
    published = {  # sessions that take turns
        (GEMMA, "3x"): (0.814, 0.0),
        (GEMMA, "2x"): (0.153, 0.0),
        (GEMMA, "1.5x"): (None, None),
        (GPT_OSS, "0.8x"): (0.474, None),
    }
    turns = tuple(
        Case(workload="sessions", model=model, memory=memory, vllm_default=default, vllm_dense=dense)
        for (model, memory), (default, dense) in published.items()
    )
    others = tuple(
        Case(workload=workload, model=model, memory=memory, arrivals=arrivals)
        for workload, arrivals in (("shuffled", "sequential"), ("poisson", "recorded"))
        for model, memory in published
    )
    return turns + others


def _prompts() -> tuple[Case, ...]:
    published = {  # with room for everything
        "system-prompt": (18 * 4_096 / (20 * 6_144), 19 * 4_096 / (20 * 6_144)),
        "long-answers": (0.763, 0.965),
        "edited-message": (0.0, 0.704),
    }
    return tuple(
        Case(workload=workload, model=model, memory="2x", vllm_default=default, vllm_dense=dense)
        for workload, (default, dense) in published.items()
        for model in (GPT_OSS, GEMMA)
    )


def _traces() -> tuple[Case, ...]:
    published = {  # of conversation_a.jsonl
        (GPT_OSS, "20GiB"): (0.040, 0.040),
        (GPT_OSS, "40GiB"): (0.045, 0.047),
        (GPT_OSS, "80GiB"): (0.070, 0.070),
        (GPT_OSS, "300GiB"): (0.154, 0.237),
        (GPT_OSS, "2000GiB"): (0.179, 0.331),
        (GEMMA, "20GiB"): (0.038, None),
        (GEMMA, "40GiB"): (0.038, None),
        (GEMMA, "80GiB"): (0.039, None),
    }
    conversation = tuple(
        Case(trace="conversation_a", model=model, memory=memory, vllm_default=default, vllm_dense=dense)
        for (model, memory), (default, dense) in published.items()
    )
    overlapping = Case(trace="conversation_a", model=GPT_OSS, memory="40GiB", arrivals="recorded")
    mixed = tuple(
        Case(trace="synthetic", model=model, memory=memory)
        for model, memory in ((GPT_OSS, "40GiB"), (GPT_OSS, "80GiB"), (GEMMA, "80GiB"))
    )
    return (*conversation, overlapping, *mixed)


def _tiers() -> tuple[Case, ...]:
    """One pool against the same memory in two tiers, and agents without and with a host tier."""
    conversation = tuple(
        Case(trace="conversation_a", model=GPT_OSS, memory=memory, host_memory=host_memory, limit=limit)
        for memory, host_memory, limit in (
            ("20GiB", "60GiB", 1_000),
            ("20GiB", "60GiB", None),
            ("200GiB", "0", None),
            ("20GiB", "180GiB", None),
        )
    )
    agents = tuple(
        Case(workload="agents", model=model, memory=memory, host_memory=host_memory, arrivals="recorded", limit=200)
        for model, memory, host_memory in (
            (GPT_OSS, "40GiB", "0"),
            (GPT_OSS, "20GiB", "20GiB"),
            (GEMMA, "80GiB", "0"),
            (GEMMA, "80GiB", "160GiB"),
        )
    )
    return conversation + agents


def _cuts() -> tuple[Case, ...]:
    """Thousand requests of the traces, which an empty cache that has learned nothing begins with."""
    return tuple(
        Case(trace=trace, model=GPT_OSS, memory="80GiB", skip=skip, limit=1_000)
        for trace, skips in (("conversation_a", (0, 1_000, 2_000, 3_000)), ("synthetic", (0, 1_000, 2_000)))
        for skip in skips
    )


CASES = _sessions() + _prompts() + _traces() + _cuts() + _tiers()
