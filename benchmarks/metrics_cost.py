"""What metrics cost: the engine's events in every step, and a scrape every five seconds at worker and router.

    python benchmarks/metrics_cost.py [--model smollm2] [--batches 1,16] [--steps 100] [--json FILE]

Processor time, not elapsed time, of one thread that computes everything: so that a busy machine moves the figures little. Each
event's sinks are timed by itself, and what timing an empty call takes is taken off again.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time, thread_time
from typing import Any

from transom_cluster.http.metrics_page import GZIP_LEVEL
from transom_cluster.telemetry.merge_metrics import merge_pages
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.router_state import RouterState
from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup import build_engine

SCRAPE_EVERY_S = 5.0
PROMPT_TOKENS = 64
NUM_ROUTERS = 3
NUMS_WORKERS = (1, 16, 200)
REPEATS = 15


class Timed:
    """An object whose methods are timed as they are called; everything else passes through."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.spent_s: dict[str, float] = {}
        self.num_calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found
        self.spent_s[name], self.num_calls[name] = 0.0, 0

        def timed(*args: Any) -> Any:
            begin_s = thread_time()
            result = found(*args)
            self.spent_s[name] += thread_time() - begin_s
            self.num_calls[name] += 1
            return result

        setattr(self, name, timed)
        return timed

    def reset(self) -> None:
        """Begin again."""
        self.spent_s = dict.fromkeys(self.spent_s, 0.0)
        self.num_calls = dict.fromkeys(self.num_calls, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(text) for text in args.batches.split(",")]
    settings = Settings.parse(
        model=args.model, num_threads=1, kv_cache_memory_bytes="128MiB", max_num_seqs=max(batches)
    )
    engine = build_engine(settings.engine_config())
    try:
        steps = [step_costs(engine, batch, args.steps) for batch in batches]
        scrapes = scrape_costs(engine)
    finally:
        engine.shutdown()
    report(steps, scrapes)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "steps": steps, "scrapes": scrapes}, indent=2) + "\n")


def step_costs(engine: Engine, batch: int, num_steps: int) -> dict[str, float]:
    """Requests from admission to their end, all in one batch: the sinks' share of the engine thread's time."""
    events = engine.events
    timed: Any = Timed(events)
    engine.events = timed
    try:
        _run(engine, batch, 4)  # every method is found
        timed.reset()
        begin_s = thread_time()
        num_calls_of_step = _run(engine, batch, num_steps)
        total_s = thread_time() - begin_s
    finally:
        engine.events = events
    empty_s = _empty_call_s()
    spent_s = {name: max(0.0, spent - timed.num_calls[name] * empty_s) for name, spent in timed.spent_s.items()}
    own_s = sum(spent_s.values())
    return {
        "batch": batch,
        "step_ms": 1e3 * total_s / num_calls_of_step,
        "events_us_per_step": 1e6 * own_s / num_calls_of_step,
        "token_us": 1e6 * spent_s["token"] / max(1, timed.num_calls["token"]),
        "publish_us": 1e6 * spent_s["published"] / max(1, timed.num_calls["published"]),
        "share_percent": 100 * own_s / total_s,
    }


def scrape_costs(engine: Engine) -> dict[str, float]:
    """Milliseconds of one scrape at a worker and at the router that is asked, by the number of workers."""
    router = _router(16)
    found = {
        "worker_page": _best_ms(lambda: engine.metrics.text(openmetrics=True)),
        "router_page": _best_ms(lambda: router.text(openmetrics=True)),
        "worker_page_kb": len(engine.metrics.text(openmetrics=True)) / 1e3,
    }
    worker_page = engine.metrics.text(openmetrics=True).decode()
    for count in NUMS_WORKERS:
        workers = [worker_page.replace('worker="0"', f'worker="{number:08}"') for number in range(count)]
        pages = [*(_router(count, f"r{number}").text(openmetrics=True) for number in range(NUM_ROUTERS)), *workers]
        found[f"merge_{count}"] = _best_ms(lambda pages=pages: merge_pages(pages, openmetrics=True))
        merged = merge_pages(pages, openmetrics=True).encode()
        found[f"gzip_{count}"] = _best_ms(lambda merged=merged: gzip.compress(merged, GZIP_LEVEL))
        found[f"page_{count}_kb"] = len(merged) / 1e3
    return found


def report(steps: list[dict[str, float]], scrapes: dict[str, float]) -> None:
    """Two tables, and what all of it comes to."""
    print("| batch | step, ms | events, us a step | of it us a token | published, us | share of the step |")
    print("|---|---|---|---|---|---|")
    for one in steps:
        print(
            f"| {one['batch']} | {one['step_ms']:.1f} | {one['events_us_per_step']:.0f} | {one['token_us']:.2f} "
            f"| {one['publish_us']:.0f} | {one['share_percent']:.2f} % |"
        )
    worker = 100 * scrapes["worker_page"] / 1e3 / SCRAPE_EVERY_S
    print(
        f"\nA worker's page: {scrapes['worker_page']:.1f} ms for {scrapes['worker_page_kb']:.0f} kB, "
        f"{worker:.2f} % of a core at a scrape every {SCRAPE_EVERY_S:.0f} s.\n"
    )
    print(f"| workers, with {NUM_ROUTERS} routers | page, kB | merge, ms | gzip, ms | router asked, share of a core |")
    print("|---|---|---|---|---|")
    for count in NUMS_WORKERS:
        merge, compress = scrapes[f"merge_{count}"], scrapes[f"gzip_{count}"]
        share = 100 * (scrapes["router_page"] + merge + compress) / 1e3 / SCRAPE_EVERY_S
        print(f"| {count} | {scrapes[f'page_{count}_kb']:.0f} | {merge:.1f} | {compress:.1f} | {share:.2f} % |")
    print(f"\nAt most, of a worker's throughput: {max(one['share_percent'] for one in steps) + worker:.2f} %.")


def _run(engine: Engine, batch: int, num_steps: int) -> int:
    """Requests of so many output tokens to their ends; the number of steps that took."""
    for number in range(batch):
        prompt = tuple(range(100 + number, 100 + number + PROMPT_TOKENS))
        params = SamplingParams(max_tokens=num_steps, ignore_eos=True, temperature=0.0)
        engine.add(Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params, seed=0))
    count = 0
    while engine.has_work:
        engine.step()
        count += 1
    return count


def _router(num_workers: int, name: str = "r0") -> RouterMetrics:
    """The metrics of a router that has seen so many workers."""
    metrics = RouterMetrics(name, model="smollm2")
    names = [f"{number:08}" for number in range(num_workers)]
    in_flight = dict.fromkeys(names, 3)
    states = {"open": num_workers, "closed": 0, "draining": 0}
    metrics.watch(
        lambda: RouterState(num_waiting=0, num_tasks=9, workers_by_state=states, in_flight_by_worker=in_flight)
    )
    for worker in names:
        metrics.routing.joined("kv", worker)
        metrics.routing.mirror_changed(worker, num_blocks=1000, version=7)
    return metrics


def _best_ms(work: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(REPEATS):
        begin_s = process_time()
        work()
        best_s = min(best_s, process_time() - begin_s)
    return 1e3 * best_s


def _empty_call_s(count: int = 20_000) -> float:
    """What a timed call of nothing says of itself."""

    class Nothing:
        def call(self) -> None:
            pass

    timed = Timed(Nothing())
    for _ in range(count):
        timed.call()
    return timed.spent_s["call"] / timed.num_calls["call"]


if __name__ == "__main__":
    main()
