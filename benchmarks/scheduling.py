"""Measures the time of the scheduler and the KV cache: a decode step by number of sequences, hashing, hit searches on long prompts.

    python benchmarks/scheduling.py [--json]

The geometry is gpt-oss-like with a third group: full, window 128 and chunk 8,192, blocks of 16 tokens. No model runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from transom_core.config import SchedulerConfig
from transom_core.contract import Request, SamplingParams
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_core.kv_cache.prefix_search import find_hit
from transom_core.kv_cache.retention import Retention
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepPlan, StepResult

BLOCK = 16
SPECS = (
    GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=BLOCK),
    GroupSpec(name="window", kind=GroupKind.WINDOW, layers=(1,), block_size=BLOCK, window=128),
    GroupSpec(name="chunk", kind=GroupKind.CHUNK, layers=(2,), block_size=BLOCK, chunk=8192),
)
STRIDE_BYTES = 393_216
BLOCKS_PER_PAGE = 32


def layout(num_pages: int) -> ArenaLayout:
    groups = tuple(
        GroupLayout(spec=spec, block_bytes=STRIDE_BYTES, stride_bytes=STRIDE_BYTES, layers=()) for spec in SPECS
    )
    return ArenaLayout(page_bytes=BLOCKS_PER_PAGE * STRIDE_BYTES, num_pages=num_pages, groups=groups)


def answer(plan: StepPlan) -> StepResult:
    return StepResult(step_id=plan.step_id, sampled_ids=[7] * sum(plan.sample))


def decode_step_ms(num_sequences: int, *, num_pages: int, num_steps: int = 160) -> dict[str, float]:
    """Milliseconds of `schedule` and `receive` while `num_sequences` decode behind prompts of 512 to 527 tokens."""
    config = SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=8192)
    scheduler = Scheduler(
        config, layout(num_pages), block_size=BLOCK, max_model_len=131_072, enable_prefix_caching=True
    )
    rng = random.Random(0)
    params = SamplingParams(max_tokens=4096)
    for name in range(num_sequences):
        prompt = tuple(rng.randrange(50_000) for _ in range(512 + rng.randrange(16)))
        scheduler.add(Request(request_id=str(name), prompt_token_ids=prompt, params=params, seed=0))
    while any(sequence.num_ready > 1 for sequence in scheduler.by_request.values()):
        scheduler.receive(answer(_plan(scheduler)))
    gc.collect()
    gc.freeze()  # as the engine does after start
    scheduling, receiving = [], []
    for _ in range(num_steps):
        begin = perf_counter()
        plan = _plan(scheduler)
        scheduling.append((perf_counter() - begin) * 1e3)
        result = answer(plan)
        begin = perf_counter()
        scheduler.receive(result)
        receiving.append((perf_counter() - begin) * 1e3)
        scheduler.cache.changes.take()
    both = [sum(pair) for pair in zip(scheduling, receiving, strict=True)]
    return {
        "schedule": statistics.median(scheduling),
        "receive": statistics.median(receiving),
        "mean": statistics.fmean(both),
        "max": max(both),
        "preemptions": scheduler.work.preemptions["recompute"],
    }


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def hashing_ms(num_hash_blocks: int) -> float:
    token_ids = [random.Random(1).randrange(200_000) for _ in range(num_hash_blocks * BLOCK)]
    return _best_ms(lambda: extend_chain([], chain_root(BLOCK), token_ids, BLOCK))


def hit_search_ms(num_hash_blocks: int) -> dict[str, float]:
    """Milliseconds of a search over `num_hash_blocks` units, by what is cached."""
    chain: list[bytes] = []
    extend_chain(chain, chain_root(BLOCK), list(range(num_hash_blocks * BLOCK)), BLOCK)
    everything, nothing = dict.fromkeys(chain, 0), dict[bytes, int]()
    every_other = dict.fromkeys(chain[::2], 0)
    cases = {
        "everything cached": (everything, everything, everything),
        "windows gone": (everything, nothing, nothing),
        "every other window block": (everything, every_other, every_other),
        "nothing cached": (nothing, nothing, nothing),
    }
    retentions = [Retention(spec) for spec in SPECS]
    return {
        name: _best_ms(lambda found=found: find_hit(retentions, found, chain, num_hash_blocks, window_repair=True))  # type: ignore[misc]
        for name, found in cases.items()
    }


def _best_ms(work: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        work()
        times.append((perf_counter() - begin) * 1e3)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256, 1024])
    arguments = parser.parse_args()
    roomy = {n: decode_step_ms(n, num_pages=n * 9) for n in arguments.sequences}
    pressed = {n: decode_step_ms(n, num_pages=n * 4 + 8) for n in arguments.sequences}
    report: dict[str, Any] = {
        "decode_step_ms": roomy,
        "decode_step_full_pool_ms": pressed,
        "hashing_8192_units_ms": hashing_ms(8192),
        "hit_search_8192_units_ms": hit_search_ms(8192),
    }
    if arguments.json:
        json.dump(report, sys.stdout, indent=2)
        return
    print(f"Python {sys.version.split()[0]}; full + window 128 + chunk 8192, blocks of {BLOCK} tokens; milliseconds")
    columns = ("schedule", "receive", "mean", "max")
    print(f"{'decode step (medians; both)':<36}" + "".join(f"{name:>9}" for name in columns))
    for title, table in (("roomy pool", roomy), ("pool full of cache", pressed)):
        for n, times in table.items():
            print(f"{f'  {n} sequences, {title}':<36}" + "".join(f"{times[name]:>9.3f}" for name in columns))
    print(f"{'hashing 8,192 units':<36}{report['hashing_8192_units_ms']:>9.3f}")
    for name, value in report["hit_search_8192_units_ms"].items():
        print(f"{f'hit search, {name}':<36}{value:>9.3f}")


if __name__ == "__main__":
    main()
