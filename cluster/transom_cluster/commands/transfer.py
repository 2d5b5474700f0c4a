"""`transom bench transfer`: measures how fast KV blocks move between the workers of a running server, as a table."""

import json
import statistics
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Annotated, Any

import httpx
import typer

from transom_cluster.commands.flags import usage_errors
from transom_core.errors import ConfigError

Measure = Callable[[str, str, int, str], dict[str, Any]]
"""Measures a fetch of some bytes from a source to a target by a wire, "nixl" or "ray", and returns its `FetchReport`'s fields."""

WIRES = ("nixl", "ray")
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # a proxy from the environment cannot reach these hosts
TIMEOUT_S = 150.0  # longer than the server's own limit


def transfer(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")],
    megabytes: Annotated[str, typer.Option(help="Sizes in MB, separated by commas.")] = "1,16,256",
    rounds: Annotated[int, typer.Option(min=1, help="Each figure is the median of these, after one to connect.")] = 5,
    api_key: Annotated[
        str | None, typer.Option(envvar="TRANSOM_API_KEY", help="An admin key if the server has any.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Measure how fast cached KV blocks move between each two workers, by NIXL, by its read alone, and by calls through Ray."""
    try:
        sizes = [int(1e6 * float(size)) for size in megabytes.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{megabytes!r} is not a list of numbers.", param_hint="--megabytes") from None
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    is_local = httpx.URL(url).host in LOOPBACK
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=not is_local) as client:

        def measure(source: str, target: str, num_bytes: int, wire: str) -> dict[str, Any]:
            asked = {"source": source, "target": target, "bytes": num_bytes, "wire": wire}
            return _answer(client, "POST", "/transfers/measure", asked)

        with usage_errors():
            workers = [one["id"] for one in _answer(client, "GET", "/")["workers"] if one.get("can_fetch")]
            if len(workers) < 2:
                raise ConfigError(
                    f"{url} has {len(workers)} workers that can fetch from others (--swap-space); 2 are needed."
                )
            if not as_json:
                typer.echo(f"{'from':>10} {'to':>10} {'MB':>7}  {'NIXL':>20}  {'its read alone':>20}  {'calls':>20}")
            for line in measure_pairs(measure, workers, sizes, rounds):
                typer.echo(json.dumps(line) if as_json else row_of(line))


def _answer(client: httpx.Client, method: str, path: str, asked: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object of a response. Raises ConfigError: there is no server, or it refuses."""
    try:
        response = client.request(method, path, params=asked)
    except httpx.HTTPError as error:
        raise ConfigError(f"{client.base_url} does not answer: {error!r}") from error
    if response.is_error:
        raise ConfigError(f"{path} answers {response.status_code}: {response.text[:300]}")
    answer: dict[str, Any] = response.json()
    return answer


def measure_pairs(measure: Measure, workers: list[str], sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each ordered pair of workers and size: the bytes, and by wire the median seconds, those of NIXL's read alone
    as "read"; or under the wire's name why it brought nothing. The wires take turns, and a first round connects."""
    for (source, target), num_bytes in ((pair, size) for pair in permutations(workers, 2) for size in sizes):
        line: dict[str, Any] = {"source": source, "target": target, "bytes": num_bytes}
        seconds: dict[str, list[float]] = {"nixl": [], "read": [], "ray": []}
        for number in range(rounds + 1):
            for wire in (one for one in WIRES if one not in line):
                ended = measure(source, target, num_bytes, wire)
                if ended["outcome"] != "fetched" or ended["wire"] != wire:
                    line[wire] = "not used" if ended["outcome"] == "fetched" else ended["outcome"]
                elif number:
                    line["bytes"] = ended["num_bytes"]
                    seconds[wire].append(ended["seconds"])
                    seconds["read"] += [ended["read_s"]] if wire == "nixl" else []
        yield {
            **line,
            **{name: statistics.median(taken) for name, taken in seconds.items() if taken and name not in line},
        }


def row_of(line: dict[str, Any]) -> str:
    """Return a row of the table: milliseconds and GB/s of each wire, or why it brought nothing."""

    def cell(value: float | str | None) -> str:
        if not isinstance(value, float):
            return "nothing is cached" if value == "not_found" else value or "-"
        return f"{1e3 * value:.1f} ms {line['bytes'] / 1e9 / max(value, 1e-9):6.2f} GB/s"

    cells = "".join(f"  {cell(line.get(name)):>20}" for name in ("nixl", "read", "ray"))
    return f"{line['source']:>10} {line['target']:>10} {line['bytes'] / 1e6:7.1f}{cells}"
