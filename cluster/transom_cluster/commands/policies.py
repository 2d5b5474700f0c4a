"""`transom bench policies`: measures what KV policies save and what they cost, as tables.

A KV policy keeps only some tokens of a request in the KV cache: in most scenarios the first few, called *sinks*, and a window of
the last ones. Each scenario runs on an engine of its own:

    memory    requests that run together, with enough KV memory and then with little
    quality   next tokens and perplexity of one text, under policies of several sizes and under full attention
    recall    answers that depend on text before the window
    stream    perplexity over a text several times as long as the length that the model was trained with
"""

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
    model: Annotated[str, typer.Argument(help="As for `transom serve`; all layers need full attention.")] = "smollm2",
    output: Annotated[Path, typer.Option(help="Folder for tables and JSON.")] = Path("policies"),
    only: Annotated[str, typer.Option(help=f"Scenarios, separated by commas, of {', '.join(SCENARIOS)}.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    requests: Annotated[int, typer.Option(min=2, help="Requests that run together.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Prompt tokens of each of them.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each of them.")] = 256,
    window: Annotated[int, typer.Option(min=32, help="Tokens in the window of requests and stream.")] = 256,
    judged_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens judged for quality, after as many unjudged.")
    ] = 512,
    stream_times: Annotated[int, typer.Option(min=1, help="The stream's length, in trained lengths.")] = 4,
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
                # Written after every scenario, so that an interrupted run leaves the tables of those that have ended.
                (output / "policies.json").write_text(json.dumps(figures.as_json(), indent=1) + "\n")
                (output / "policies.md").write_text(tables(figures))
        typer.echo(tables(figures))


def _measure(figures: PolicyFigures, scenario: str, settings: dict[str, Any]) -> None:
    """Measure one scenario on new engines, and store the result in `figures`."""
    from transom_worker.bench.policies.scenarios import Load, memory_and_throughput, quality_by_window, recall, stream

    setup, engine = figures.setup, _engine(settings)
    if scenario == "memory":
        load = Load(
            num_requests=setup["requests"], prompt_tokens=setup["prompt_tokens"], output_tokens=setup["output_tokens"]
        )
        figures.roomy = memory_and_throughput(engine, load, setup["window"])
        engine.shutdown()
        # The other engine has memory for two and a half of the requests under full attention.
        kv_bytes = int(2.5 * figures.roomy["full"].peak_kv_bytes / load.num_requests)
        engine = _engine(settings | {"kv_cache_memory_bytes": kv_bytes})
        figures.tight = memory_and_throughput(engine, load, setup["window"])
    elif scenario == "quality":
        judged = setup["judged_tokens"]
        figures.quality = quality_by_window(engine, num_tokens=2 * judged, judged_from=judged)
    elif scenario == "recall":
        figures.recall = recall(engine)
    else:
        setup["trained_len"] = length = engine.info.max_model_len
        window = setup["window"] - 4  # with its 4 sinks the stream keeps as many tokens as `--window` says
        figures.stream = stream(engine, trained_len=length, times=setup["stream_times"], window=window, num_parts=8)
    engine.shutdown()


def _engine(settings: dict[str, Any]) -> Engine:
    from transom_core.settings.settings import Settings
    from transom_worker.engine.startup import build_engine

    return build_engine(Settings.parse(**settings, max_num_seqs=32).engine_config())
