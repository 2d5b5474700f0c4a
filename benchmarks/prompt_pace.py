"""What a target time of steps changes for short requests beside long prompts: first tokens and gaps between tokens.

    python benchmarks/prompt_pace.py [--model smollm2] [--targets 0,0.2] [--rounds 3]

Closed loop of 16 clients on one engine in this process: prompts of 32 to 128 random tokens and answers of 32; every 16th prompt has
2,000 tokens. Engines with different targets share the weights and take turns. Ratios count, since other work moves the machine's
speed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.engine.engine import Engine
from transom_worker.engine.startup import build_engine
from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.execution.setup.model_loading import load_model, set_threads

NUM_CLIENTS = 16
NUM_REQUESTS = 32
LONG_PROMPT = 2000
NUM_OUTPUT = 32
VOCABULARY = 40_000


class ClosedLoop:
    """Keeps `NUM_CLIENTS` requests at an engine, and notes when their tokens come."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._rng, self._ids = engine, random.Random(seed), count()
        self._sent_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}
        self._long: set[str] = set()
        self.first_s: list[float] = []
        self.long_first_s: list[float] = []
        self.gaps_s: list[float] = []

    def run(self) -> float:
        """Send `NUM_REQUESTS` requests; returns output tokens per second."""
        begin_s = time.perf_counter()
        for _ in range(NUM_CLIENTS):
            self._send()
        num_ended = num_tokens = 0
        while num_ended < NUM_REQUESTS:
            for event in self._engine.step():
                num_tokens += 1
                self._take(event.request_id)
                if event.finish_reason is not None:
                    num_ended += 1
                    self._send()
        elapsed_s = time.perf_counter() - begin_s
        for request_id in list(self._engine.requests):
            self._engine.abort(request_id)
        return num_tokens / elapsed_s

    def _send(self) -> None:
        number = next(self._ids)
        if number >= NUM_REQUESTS:
            return
        is_long = number % NUM_CLIENTS == NUM_CLIENTS // 2
        num_prompt = LONG_PROMPT if is_long else self._rng.randint(32, 128)
        request_id = f"{time.perf_counter_ns()}-{number}"
        if is_long:
            self._long.add(request_id)
        self._sent_s[request_id] = time.perf_counter()
        self._engine.add(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(self._rng.randrange(100, VOCABULARY) for _ in range(num_prompt)),
                params=SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True),
                seed=0,
            )
        )

    def _take(self, request_id: str) -> None:
        now_s = time.perf_counter()
        if request_id in self._last_s:
            self.gaps_s.append(now_s - self._last_s[request_id])
        else:
            (self.long_first_s if request_id in self._long else self.first_s).append(now_s - self._sent_s[request_id])
        self._last_s[request_id] = now_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--targets", default="0,0.2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    targets = [float(part) for part in options.targets.split(",")]
    settings = Settings.parse(model=options.model, device="cpu", kv_cache_memory_bytes="1GiB")
    config = settings.engine_config()
    set_threads(None)
    loaded = load_model(config.model)
    engines = {}
    for target in targets:
        own = replace(config, scheduler=replace(config.scheduler, target_step_s=target or None))
        engines[target] = build_engine(own, executor=LocalExecutor(own, loaded))
    rows: dict[float, list[list[float]]] = {target: [] for target in targets}
    for number in range(options.rounds):
        for target in targets if number % 2 else reversed(targets):
            loop = ClosedLoop(engines[target], seed=number)
            rows[target].append([loop.run(), *figures(loop)])
    print(
        f"{'target, s':>9}  tok/s | first token p50  p95 | long prompts' first | gaps p50  p99 (ms; medians of rounds)"
    )
    for target in targets:
        tok_s, *ms = (statistics.median(column) for column in zip(*rows[target], strict=True))
        print(f"{target:9}  {tok_s:5.0f} | {ms[0]:10.0f} {ms[1]:9.0f} | {ms[2]:19.0f} | {ms[3]:8.0f} {ms[4]:4.0f}")


def figures(loop: ClosedLoop) -> list[float]:
    """Milliseconds: first tokens of short prompts (p50, p95), of long ones (p50), gaps (p50, p99)."""
    quantiles = (
        (loop.first_s, 0.5),
        (loop.first_s, 0.95),
        (loop.long_first_s, 0.5),
        (loop.gaps_s, 0.5),
        (loop.gaps_s, 0.99),
    )
    return [1e3 * quantile(values, share) for values, share in quantiles]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of all lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
