"""The command of the soak: `python -m benchmarks.serving.soak --help`; the package's docstring has the rest."""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.json_child import ROOT
from benchmarks.server_process import READY, start_server
from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.cases import make_cases
from benchmarks.serving.soak.cluster import COMMON, TWO_WORKERS, Cluster, settings_of
from benchmarks.serving.soak.disk_blocks import check_disk
from benchmarks.serving.soak.journal import Journal
from benchmarks.serving.soak.phases import Soak
from tests.tiny_checkpoints import tiny_llama

STOP_TIMEOUT_S = 400.0
REPORTS = ROOT / "benchmarks" / "results" / "local"


def main() -> None:
    options = read_options()
    if "RAY_AUTH_MODE" not in os.environ:  # the server and the processes that deploy on it share a token
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    path = Path(options.json or REPORTS / f"{time.strftime('%Y-%m-%d-%H%M')}-soak.json")
    COMMON["kv_transfer_wire"] = options.kv_transfer_wire
    journal = Journal(path.with_suffix(".events.jsonl"))
    try:
        soak(options, journal)
    finally:
        path.write_text(json.dumps({"options": vars(options), **journal.report()}, indent=2))
        print(path.read_text())
        print(f"Report: {path}\nEvents: {journal.path}")
        journal.close()
    for promise in sorted({promise for promise, _ in journal.broken}):
        print(f"BROKEN: {promise}", file=sys.stderr)
    raise SystemExit(bool(journal.broken))


def soak(options: argparse.Namespace, journal: Journal) -> None:
    """Start a server, run all phases, and end it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk, models = folder / "disk", (tiny_llama(folder / "first", seed=0), tiny_llama(folder / "second", seed=1))
        server = stack.enter_context(start_server(str(models[0]), **settings_of(TWO_WORKERS, disk)))
        try:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(Soak(options, Cluster(server, models, disk, journal), journal).run())
            log = server.log_text()
            journal.note("log", text=log[log.find(READY) :][-20000:])
        finally:
            code, killed = server.stop(STOP_TIMEOUT_S)
        check_disk(disk, models, make_cases(options.seed), journal)
    if code or killed:
        left = [process.pid for process in killed]
        journal.broke(promises.LEFTOVERS, f"the server ended with status {code}; processes that did not end: {left}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Traffic and kills on a cluster of this machine; exit status 1 if a promise broke."
    )
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="Added to --hours; 10 if both are missing.")
    parser.add_argument("--seed", type=int, default=0, help="Of every random choice.")
    parser.add_argument("--clients", type=int, default=6, help="Clients at once, bursts apart.")
    wires = ("auto", "nixl", "ray")
    parser.add_argument("--kv-transfer-wire", default="auto", choices=wires, help="For KV blocks between workers.")
    parser.add_argument("--json", default="", help="The report; events are written beside it.")
    options = parser.parse_args()
    options.seconds = 3600 * options.hours + 60 * options.minutes or 600.0
    return options


if __name__ == "__main__":
    main()
