"""`transom bench policies`: measures what KV policies save and what they cost, as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transom_cluster.commands.flags import usage_errors

if TYPE_CHECKING:
    from transom_worker.bench.policies.results import PolicyFigures
    from transom_worker.engine.engine import Engine

SCENARIOS = ("memory", "quality", "recall", "stream")


def policies(
    model: Annotated[
        str, typer.Argument(help="As for `transom serve`; all its layers need full attention.")
    ] = "smollm2",
    output: Annotated[Path, typer.Option(help="Folder for tables and JSON.")] = Path("policies"),
    only: Annotated[str, typer.Option(help=f"Scenarios, separated by commas, of {', '.join(SCENARIOS)}.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    requests: Annotated[int, typer.Option(min=2, help="Requests that run together.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Of each of these requests.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each of these requests.")] = 256,
    window: Annotated[int, typer.Option(min=32, help="Tokens of their window, and of the stream's.")] = 256,
    judged_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of the text over which quality is judged; as many are read before.")
    ] = 512,
    stream_times: Annotated[int, typer.Option(min=1, help="Trained lengths that the stream has.")] = 4,
) -> None:
    """Compare KV policies with full attention: memory, preemptions, quality, recall, and streams beyond the trained length."""
    from transom_worker.bench.policies.results import PolicyFigures, tables

    chosen = only.split(",") if only else list(SCENARIOS)
    unknown = sorted(set(chosen) - set(SCENARIOS))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)} is none of {', '.join(SCENARIOS)}.", param_hint="--only")
    setup = {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "window": window,
        "judged_tokens": judged_tokens,
        "stream_times": stream_times,
    }
    figures = PolicyFigures(model=model, setup=setup)
    output.mkdir(parents=True, exist_ok=True)
    with usage_errors():
        for scenario in SCENARIOS:
            if scenario in chosen:
                _measure(figures, scenario, {"model": model, "device": device})
                (output / "policies.json").write_text(json.dumps(figures.as_json(), indent=1) + "\n")
                (output / "policies.md").write_text(tables(figures))
        typer.echo(tables(figures))


def _measure(figures: PolicyFigures, scenario: str, settings: dict[str, Any]) -> None:
    """Measure one scenario on a new engine."""
    from transom_worker.bench.policies.scenarios import quality_by_window, recall, stream

    if scenario == "memory":
        _measure_memory(figures, settings)
        return
    setup, engine = figures.setup, _engine(settings, kv_bytes=None)
    judged, trained_len = setup["judged_tokens"], engine.info.max_model_len
    if scenario == "quality":
        figures.quality = quality_by_window(engine, num_tokens=2 * judged, judged_from=judged)
    elif scenario == "recall":
        figures.recall = recall(engine)
    else:
        setup["trained_len"] = trained_len
        figures.stream = stream(
            engine, trained_len=trained_len, times=setup["stream_times"], window=setup["window"] - 4, num_parts=8
        )
    engine.shutdown()


def _measure_memory(figures: PolicyFigures, settings: dict[str, Any]) -> None:
    """Measure concurrent requests with enough memory, then with memory for two and a half of them under full attention."""
    from transom_worker.bench.policies.scenarios import Load, memory_and_throughput

    setup = figures.setup
    load = Load(
        num_requests=setup["requests"], prompt_tokens=setup["prompt_tokens"], output_tokens=setup["output_tokens"]
    )
    engine = _engine(settings, kv_bytes=None)
    figures.roomy = memory_and_throughput(engine, load, setup["window"])
    engine.shutdown()
    tight = _engine(settings, kv_bytes=int(2.5 * figures.roomy["full"].peak_kv_bytes / load.num_requests))
    figures.tight = memory_and_throughput(tight, load, setup["window"])
    tight.shutdown()


def _engine(settings: dict[str, Any], *, kv_bytes: int | None) -> Engine:
    from transom_core.settings.settings import Settings
    from transom_worker.engine.startup import build_engine

    more = {} if kv_bytes is None else {"kv_cache_memory_bytes": kv_bytes}
    return build_engine(Settings.parse(**settings, **more, max_num_seqs=32).engine_config())
