"""`transom compile`: compiles what a model's workers and the routers need on this machine's processor, ahead of the first start."""

from __future__ import annotations

from typing import Annotated

import typer


def compile_kernels(
    model: Annotated[str, typer.Argument(help="As for `transom serve`.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="As for `transom serve`.")] = "none",
    kv_cache_dtype: Annotated[str, typer.Option(help="As for `transom serve`.")] = "auto",
) -> None:
    """Compile the CPU kernels of a model and the router's prefix index now, so that the first start does not have to.

    The kernels' code is kept in the user's cache directory (or TRANSOM_CACHE_DIR) for this processor and this version; the router's
    beside its sources (or in NUMBA_CACHE_DIR).
    """
    from transom_cluster.routing.fleet_index import FleetPrefixIndex
    from transom_core.errors import ConfigError, ModelError
    from transom_worker.precompile import precompile

    FleetPrefixIndex()  # its first one compiles it
    try:
        compiled = precompile(model, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    except (ConfigError, ModelError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(
        f"{compiled.num_kernels} kernels compiled in {compiled.seconds:.1f} s; their code is in {compiled.directory}."
        if compiled.num_kernels
        else f"Every kernel was compiled already; the code is in {compiled.directory}."
    )
