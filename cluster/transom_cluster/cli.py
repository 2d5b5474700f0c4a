"""The `transom` command. Each subcommand imports heavy modules only when it runs, so that `--help` prints at once."""

import os
from typing import Any

import typer

from transom_cluster.commands.bench import bench
from transom_cluster.commands.compile import compile_kernels
from transom_cluster.commands.flags import settings_as_flags, usage_errors
from transom_cluster.commands.plan import plan
from transom_core import __version__
from transom_core.settings.settings import Settings

app = typer.Typer(
    help="Transom: a Ray-distributed serving cluster for hybrid-attention LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")
app.command()(plan)
app.command("compile")(compile_kernels)


@app.command()
@settings_as_flags
def serve(**given: Any) -> None:
    """Serve MODEL over HTTP, on a private Ray cluster on this machine, until Ctrl-C."""
    from transom_cluster.commands.serve import run_server

    values = {name: value for name, value in given.items() if value not in (None, [])}
    if "api_key" in values:
        values["api_key"] = tuple(values["api_key"])
    with usage_errors():
        settings = Settings.parse(**values)
    raise typer.Exit(run_server(settings, values))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"transom {__version__}")


def main() -> None:
    """Entry point of the `transom` script."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()


if __name__ == "__main__":
    main()
