"""Holds all figures of `transom bench policies`, and formats them as Markdown tables and JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from transom_worker.bench.policies.policy_runs import Run
from transom_worker.bench.policies.scenarios import Quality, Recall, StreamPart

MIB = 2**20
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class PolicyFigures:
    """All figures; those that were not measured are empty. `roomy` and `tight` map a policy to its run."""

    model: str
    setup: dict[str, Any]
    roomy: dict[str, Run] = field(default_factory=dict)
    tight: dict[str, Run] = field(default_factory=dict)
    quality: list[Quality] = field(default_factory=list)
    recall: list[Recall] = field(default_factory=list)
    stream: list[StreamPart] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, without the runs' outputs."""
        figures = asdict(self)
        for runs in (figures["roomy"], figures["tight"]):
            for run in runs.values():
                for name in ("output_ids", "prompt_logprobs", "step_cpu_s"):
                    del run[name]
        return figures


def tables(figures: PolicyFigures) -> str:
    """Return the figures as Markdown tables."""
    parts = [
        _runs("1. Memory and throughput with enough KV memory", figures.roomy),
        _runs("2 and 4. The same requests in a tight KV budget", figures.tight),
        _table(
            "3. Quality by tokens kept, over the same text",
            ("policy", "same likeliest token", "KL, at least (nats)", "perplexity"),
            figures.quality,
            lambda row: (row.name, f"{row.agreement:.1%}", f"{row.kl:.3f}", f"{row.perplexity:.2f}"),
        ),
        _table(
            "Where windows lose",
            ("task", "policy", "distance (tokens)", "probability of an answer's token", "greedy tokens right"),
            figures.recall,
            lambda row: (row.task, row.policy, str(row.distance), f"{row.probability:.3f}", f"{row.greedy:.0%}"),
        ),
        _table(
            "A stream beyond the trained length",
            ("policy", "tokens", "perplexity", "CPU ms of a decode step", "peak KV (MiB)"),
            figures.stream,
            lambda row: (
                row.policy,
                f"{row.begin:,} to {row.end:,}",
                f"{row.perplexity:.2f}",
                f"{row.decode_cpu_ms:.0f}",
                f"{row.peak_kv_bytes / MIB:.1f}",
            ),
        ),
    ]
    return "\n".join(part for part in parts if part)


def _runs(title: str, runs: dict[str, Run]) -> str:
    return _table(
        title,
        (
            "policy",
            "peak KV (MiB)",
            "running at once",
            "preemptions",
            "tokens computed again",
            "output tokens/s",
            "CPU ms an output token",
        ),
        list(runs.items()),
        lambda row: (
            row[0],
            f"{row[1].peak_kv_bytes / MIB:.1f}",
            str(row[1].peak_running),
            str(row[1].num_preemptions),
            f"{row[1].recomputed_tokens:,}",
            f"{row[1].tokens_per_s:.1f}",
            f"{row[1].cpu_ms_per_token:.0f}",
        ),
    )


def _table(title: str, header: Sequence[str], rows: Sequence[T], cells: Callable[[T], Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *(cells(row) for row in rows)]
    return f"### {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
