"""`transom bench ...`: measures this machine without a server, or a running one."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from transom_cluster.commands.flags import usage_errors
from transom_cluster.commands.policies import policies
from transom_cluster.commands.simulate import simulate
from transom_cluster.commands.transfer import transfer

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
bench.command()(simulate)
bench.command()(policies)
bench.command()(transfer)


@bench.callback()
def _group() -> None:
    """Measure this machine."""


@bench.command()
def offline(
    model: Annotated[str, typer.Argument(help="As for `transom serve`.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="none or int8.")] = "none",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Each figure is the best of these.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the prefill and decode speed of one worker, without HTTP."""
    from transom_core.settings.settings import Settings
    from transom_worker.bench.offline import run_offline
    from transom_worker.engine.startup import build_engine

    try:
        sizes = tuple(int(size) for size in batches.split(","))
        if min(sizes) < 1:
            raise ValueError(batches)
    except ValueError:
        raise typer.BadParameter(
            f"{batches!r} is not a list of numbers from 1 on, such as 1,8,32.", param_hint="--batches"
        ) from None
    with usage_errors():
        settings = Settings.parse(
            model=model, dtype=dtype, quantization=quantization, device=device, max_num_seqs=max(64, *sizes)
        )
        engine = build_engine(settings.engine_config())
        figures = run_offline(
            engine, batches=sizes, prompt_tokens=prompt_tokens, output_tokens=output_tokens, repeats=repeats
        )
        engine.shutdown()
    if as_json:
        typer.echo(json.dumps({"model": model, "dtype": dtype, "quantization": quantization, **asdict(figures)}))
        return
    typer.echo(f"prefill {figures.prompt_tokens} tokens: {figures.prefill_tokens_per_s:,.0f} tokens/s")
    for point in figures.decode:
        typer.echo(
            f"decode batch {point.batch:>3}: {point.tokens_per_s:,.0f} tokens/s "
            f"({point.step_ms:.1f} ms a step, {point.outside_forward_ms:.2f} ms of it outside the forward pass)"
        )
