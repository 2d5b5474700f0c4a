"""Holds all figures of `transom bench policies`, formats them as Markdown tables and JSON, and draws them as PNG plots with
matplotlib (`pip install 'transom[plots]'`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transom_core.errors import ConfigError
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


Value = Callable[[Any], float]

_COLOURS = {
    "full": "#1f2328",
    "window": "#2563eb",
    "window without sinks": "#93b4f5",
    "adaptive": "#d97706",
    "heavy": "#059669",
}


def draw(figures: PolicyFigures, folder: Path) -> list[Path]:
    """Write the plots of what was measured, and return their files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "The plots need matplotlib, which is not installed. Run pip install 'transom[plots]', or give --no-plots."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    plots: list[tuple[str, bool, Callable[[Any, PolicyFigures], Any]]] = [
        ("policies_memory", bool(figures.roomy and figures.tight), _memory),
        ("policies_quality", bool(figures.quality), _quality),
        ("policies_recall", bool(figures.recall), _recall),
        ("policies_stream", bool(figures.stream), _stream),
    ]
    for name, has_figures, plot in plots:
        if has_figures:
            canvas = plot(pyplot, figures)
            canvas.tight_layout()
            drawn.append(folder / f"{name}.png")
            canvas.savefig(drawn[-1], dpi=110)
            pyplot.close(canvas)
    return drawn


def _memory(pyplot: Any, figures: PolicyFigures) -> Any:
    """Draw scenarios 1, 2 and 4."""
    canvas, axes = pyplot.subplots(1, 4, figsize=(13, 3.2))
    panels: list[tuple[Any, str, dict[str, Run], Value]] = [
        (axes[0], "1. peak KV (MiB)", figures.roomy, lambda run: run.peak_kv_bytes / MIB),
        (axes[1], "1. output tokens/s", figures.roomy, lambda run: run.tokens_per_s),
        (axes[2], "2. preemptions, tight budget", figures.tight, lambda run: run.num_preemptions),
        (axes[3], "4. requests at once, tight budget", figures.tight, lambda run: run.peak_running),
    ]
    for axis, title, runs, value in panels:
        bars = axis.bar(list(runs), [value(run) for run in runs.values()], color=[_COLOURS["full"], _COLOURS["window"]])
        axis.bar_label(bars, fmt="%.4g")
        axis.set_title(title, fontsize=10)
    return canvas


def _quality(pyplot: Any, figures: PolicyFigures) -> Any:
    """Draw scenario 3."""
    canvas, axes = pyplot.subplots(1, 3, figsize=(13, 3.8))
    panels: list[tuple[Any, str, Value]] = [
        (axes[0], "same likeliest token", lambda row: row.agreement),
        (axes[1], "KL, at least (nats)", lambda row: max(row.kl, 1e-4)),
        (axes[2], "perplexity", lambda row: row.perplexity),
    ]
    for axis, title, value in panels:
        for kind in dict.fromkeys(row.kind for row in figures.quality):
            rows = [row for row in figures.quality if row.kind == kind]
            if kind == "full":
                axis.axhline(value(rows[0]), color=_COLOURS[kind], linestyle=":", label=kind)
            else:
                kept = [row.kept_tokens for row in rows]
                axis.plot(kept, [value(row) for row in rows], marker="o", color=_COLOURS[kind], label=kind)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens kept, at most")
        axis.set_title(title, fontsize=10)
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=8)
    return canvas


def _recall(pyplot: Any, figures: PolicyFigures) -> Any:
    """Draw the cases in which windows lose."""
    tasks = list(dict.fromkeys(row.task for row in figures.recall))
    canvas, axes = pyplot.subplots(1, len(tasks), figsize=(13, 3.4), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        rows = [row for row in figures.recall if row.task == task]
        axis.barh(
            [row.policy for row in rows],
            [row.probability for row in rows],
            color=[_COLOURS[row.policy.split(" ")[0]] for row in rows],
        )
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.set_title(f"{task}: probability of an answer's token, {rows[0].distance:,} tokens back", fontsize=9)
    return canvas


def _stream(pyplot: Any, figures: PolicyFigures) -> Any:
    """Draw perplexity, time and memory along a stream."""
    canvas, axes = pyplot.subplots(1, 3, figsize=(13, 3.4))
    panels: list[tuple[Any, str, Value]] = [
        (axes[0], "perplexity", lambda row: row.perplexity),
        (axes[1], "CPU ms of a decode step", lambda row: row.decode_cpu_ms),
        (axes[2], "peak KV (MiB)", lambda row: row.peak_kv_bytes / MIB),
    ]
    for axis, title, value in panels:
        for policy in dict.fromkeys(row.policy for row in figures.stream):
            rows = [row for row in figures.stream if row.policy == policy]
            kind = "window without sinks" if "without" in policy else "window"
            axis.plot(
                [row.end for row in rows],
                [value(row) for row in rows],
                marker="o",
                color=_COLOURS[kind],
                label=policy,
            )
        trained = figures.setup.get("trained_len")
        if trained:
            axis.axvline(trained, color=_COLOURS["full"], linestyle=":", linewidth=1)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens of the stream (dotted: the trained length)")
        axis.set_title(title, fontsize=10)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
    return canvas
