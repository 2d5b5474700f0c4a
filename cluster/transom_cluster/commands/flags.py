"""Makes command-line flags from `Settings`, so that flags, YAML and keywords always have the same names, types and defaults. Also
shows the errors of wrong settings."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from transom_cluster.http.api_keys import KEY_VARIABLES
from transom_core.errors import ConfigError, ModelError, RequestError
from transom_core.settings.settings import Settings

USAGE_ERROR = 2  # the exit code that typer itself uses for wrong flags
_SIZES = {"kv_cache_memory_bytes": "BYTES|512MiB", "swap_space": "GIB|512MiB", "disk_space": "BYTES|512MiB"}
_ENVIRONMENT: dict[str, list[str]] = {
    **{name: list(variables) for name, variables in KEY_VARIABLES.items()},
    "otlp_traces_endpoint": ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"],
}


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Show an error of the user's settings, model or request in one line, and exit with `USAGE_ERROR`."""
    try:
        yield
    except (ConfigError, ModelError, RequestError) as error:
        typer.echo(f"transom: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None


def settings_as_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes keywords a positional argument for the model and a flag for every other setting.

    A flag that the user does not give has the value None.
    """
    parameters = [_parameter(name, field) for name, field in Settings.model_fields.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, field: Any) -> inspect.Parameter:
    annotation: Any = field.annotation
    if name == "model":
        argument = typer.Argument(help=field.description, metavar="MODEL", show_default=False)
        return _keyword(name, Annotated[str, argument], inspect.Parameter.empty)
    flag = name.replace("_", "-")
    has_off_switch = annotation is bool and field.default is True
    option = typer.Option(
        f"--{flag}/--no-{flag}" if has_off_switch else f"--{flag}",
        help=_help(field.description, field.default),
        metavar=_values(name, field),
        show_default=False,
        envvar=_ENVIRONMENT.get(name),
    )
    return _keyword(name, Annotated[_flag_type(name, annotation), option], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_type(name: str, annotation: Any) -> Any:
    """Return the type that the command line parses, which is a number or a switch where possible. All other values stay text:
    `Settings` checks them, with better messages."""
    if name in _SIZES:
        return str | None  # such as 512MiB
    if name in ("api_key", "worker_group", "allowed_origins", "served_model_name", "lora_modules"):
        return list[str] | None
    for kind in (bool, int, float):
        if annotation is kind or kind in get_args(annotation):
            return kind | None
    return str | None


def _values(name: str, field: Any) -> str | None:
    """Return the choices of a flag, or the limits of its number, for its help; None: the type tells enough."""
    if get_origin(field.annotation) is Literal:
        return "|".join(map(str, get_args(field.annotation)))
    words = ("ge", "gt", "le")
    limits = {word: getattr(one, word) for one in field.metadata for word in words if hasattr(one, word)}
    lowest = f">{limits['gt']}" if "gt" in limits else limits.get("ge", "")
    return _SIZES.get(name) or (f"{lowest}..{limits.get('le', '')}" if limits else None)


def _help(description: str | None, default: Any) -> str:
    if isinstance(default, int) and default >= 2**30:
        default = f"{default >> 30}GiB"
    return str(description) if default in (None, (), True, False) else f"{description} [{default}]"
