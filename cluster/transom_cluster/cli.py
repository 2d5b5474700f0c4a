"""The `transom` command. Each subcommand imports heavy modules only when it runs, so that `--help` prints at once."""

import os
import signal
from typing import Annotated, Any

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

DEFAULT_URL = "http://127.0.0.1:8000"


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
def chat(
    url: Annotated[str, typer.Option(help="The server.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="The served model if unset.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Per response; up to the model's length if unset.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TRANSOM_API_KEY")] = None,
) -> None:
    """Talk to a running server."""
    from transom_cluster.commands.chat import ChatSession, run_chat

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    session = ChatSession(url=url, model=model, system=system, api_key=api_key, options=options)
    raise typer.Exit(run_chat(session))


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
