"""The command of the soak: `python -m benchmarks.serving.soak --help`; the package's docstring has the rest."""

import argparse
import asyncio
import contextlib
import os
import platform
import secrets
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.json_child import ROOT
from benchmarks.server_process import READY, ServerError, ServerProcess, free_port, transom_serve
from benchmarks.serving.soak import journal as promises
from benchmarks.serving.soak.cases import make_cases
from benchmarks.serving.soak.cluster import COMMON, TWO_WORKERS, Cluster, copy_sources, settings_of
from benchmarks.serving.soak.disk_blocks import check_disk
from benchmarks.serving.soak.journal import Journal
from benchmarks.serving.soak.phases import Soak
from benchmarks.serving.soak.report import Report
from tests.tiny_checkpoints import tiny_llama

STARTS = 6  # Ray gives its own processes 30 s to start, of which a full machine may make too little
START_S = 400.0
REPORTS = ROOT / "benchmarks" / "results" / "local"


def main() -> None:
    options = read_options()
    if "RAY_AUTH_MODE" not in os.environ:  # the server and the processes that deploy on it share a token
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    report_path = Path(options.json or REPORTS / f"{time.strftime('%Y-%m-%d-%H%M')}-soak.json")
    COMMON["kv_transfer_wire"] = options.kv_transfer_wire
    journal = Journal(report_path.with_suffix(".events.jsonl"))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
    asked = {"seed": options.seed, "clients": options.clients, "hangs": options.hangs, "wire": options.kv_transfer_wire}
    report = Report(setup={**asked, **machine})
    try:
        soak(options, journal, report)
    finally:
        report.write(report_path, journal)
        print(report_path.read_text())
        print(f"Report: {report_path}\nEvents: {journal.path}")
        journal.close()
    for promise in sorted({one.promise for one in journal.broken}):
        print(f"BROKEN: {promise}", file=sys.stderr)
    raise SystemExit(bool(journal.broken))


def soak(options: argparse.Namespace, journal: Journal, report: Report) -> None:
    """Start a server, run all phases, and end it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sources, disk = copy_sources(folder / "sources"), folder / "disk"
        models = tiny_llama(folder / "first", seed=0), tiny_llama(folder / "second", seed=1)
        server, url = start(models[0], disk, journal)
        try:
            cluster = Cluster(server, url, sources, models, disk, journal)
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(Soak(options, cluster, journal, report).run())
            log = server.log_text()
            journal.note("log", text=log[log.find(READY) :][-20000:])
        finally:
            code, killed = server.stop(START_S)
        check_disk(disk, models, make_cases(options.seed), journal)
    if code or killed:
        left = [process.pid for process in killed]
        journal.broke(promises.LEFTOVERS, f"the server ended with status {code}; processes that did not end: {left}")


def start(model: Path, disk: Path, journal: Journal) -> tuple[ServerProcess, str]:
    """Start the server; the server and its URL."""
    for attempt in range(STARTS):
        port = free_port()
        command = transom_serve(str(model), port, **settings_of(TWO_WORKERS, disk))
        server = ServerProcess("transom", command, os.environ)
        try:
            server.wait_until(lambda: READY in server.log_text(), START_S)  # noqa: B023, called at once
        except ServerError as error:
            journal.note("start failed", attempt=attempt, error=str(error))
            server.stop()
        else:
            return server, f"http://127.0.0.1:{port}"
    raise SystemExit("The server did not start; the journal has its log.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Traffic and kills on a cluster of this machine; exit status 1 if a promise broke."
    )
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="Added to --hours; 10 if both are missing.")
    parser.add_argument("--seed", type=int, default=0, help="Of every random choice.")
    parser.add_argument("--clients", type=int, default=6, help="Clients at once, bursts apart.")
    parser.add_argument("--pause-s", type=float, default=1.5, help="Mean pause of a client between two requests.")
    parser.add_argument("--disturb-s", type=float, default=20.0, help="Mean pause between two disturbances.")
    parser.add_argument(
        "--hangs", action=argparse.BooleanOptionalAction, default=True, help="Stop processes (SIGSTOP), too."
    )
    parser.add_argument(
        "--kv-transfer-wire",
        default="auto",
        choices=("auto", "nixl", "ray"),
        help="How KV blocks move between workers.",
    )
    parser.add_argument("--json", default="", help="The report; events are written beside it.")
    options = parser.parse_args()
    options.seconds = 3600 * options.hours + 60 * options.minutes or 600.0
    return options


if __name__ == "__main__":
    main()
