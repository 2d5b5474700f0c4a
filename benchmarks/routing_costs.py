"""What mirrors, placements and index updates cost, at sizes of large deployments."""

from __future__ import annotations

import gc
import pickle
import random
import tracemalloc
from collections.abc import Callable
from statistics import fmean, median
from time import perf_counter, process_time

from scheduling import layout
from transom_cluster.routing.fleet_index import FleetPrefixIndex
from transom_cluster.routing.placer import Placer
from transom_worker.config import SchedulerConfig
from transom_worker.contract import Request, SamplingParams, WorkerInfo, WorkerLoad, WorkerMessage
from transom_worker.kvcache.events import CacheShape, KvRun, KvUpdate
from transom_worker.kvcache.groups import GroupKind, GroupSpec
from transom_worker.kvcache.hashing import chain_root, extend_chain
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepResult

BLOCK = 16
NUM_BLOCKS = 1_000_000
RUN_BLOCKS = 4
PROMPT_TOKENS = 131_072
NUM_WORKERS = 8
SHAPE = CacheShape(
    groups=(
        GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=BLOCK),
        GroupSpec(name="window", kind=GroupKind.WINDOW, layers=(1,), block_size=BLOCK, window=128),
    ),
    block_size=BLOCK,
    window_repair=True,
    enable_prefix_caching=True,
)


def costs() -> dict[str, float]:
    """Every figure by name."""
    return mirror_costs() | place_costs() | update_costs()


def mirror_costs() -> dict[str, float]:
    """Of one mirror with a million blocks, half in each group: whole index, then removed and added block by block."""
    rng = random.Random(0)
    digests = [rng.randbytes(32) for _ in range(NUM_BLOCKS)]
    half = NUM_BLOCKS // 2
    runs = (KvRun("added", 0, tuple(digests[:half])), KvRun("added", 1, tuple(digests[half:])))
    whole = KvUpdate(after=0, version=NUM_BLOCKS, runs=runs, whole=True)
    message = pickle.dumps(whole, protocol=5)
    del digests, runs, whole
    gc.collect()
    tracemalloc.start()
    whole = pickle.loads(message)
    index = FleetPrefixIndex()
    mirror = index.join(SHAPE)
    mirror.apply(whole)
    used = whole.runs[0].digests
    del whole
    gc.collect()
    memory_bytes = tracemalloc.get_traced_memory()[0] - 8 * len(used)
    tracemalloc.stop()
    steps = [KvRun("removed", 0, used[at : at + RUN_BLOCKS]) for at in range(0, half, RUN_BLOCKS)]
    steps += [KvRun("added", run.group, run.digests) for run in steps]
    begin = perf_counter()
    for run in steps:
        update = KvUpdate(after=mirror.version, version=mirror.version + RUN_BLOCKS, runs=(run,))
        mirror.apply(update)
    applied_s = perf_counter() - begin
    again = pickle.loads(message)
    begin = perf_counter()
    mirror.apply(again)
    return {
        "mirror bytes per block": memory_bytes / NUM_BLOCKS,
        "whole index of a million blocks, MB sent": len(message) / 1e6,
        "whole index of a million blocks, ms to apply": (perf_counter() - begin) * 1e3,
        "blocks applied per second, updates of 4": len(steps) * RUN_BLOCKS / applied_s,
    }


def place_costs() -> dict[str, float]:
    """Milliseconds of `place` on a long prompt among eight workers, by what they have cached."""
    rng = random.Random(1)
    prompt = tuple(rng.randrange(200_000) for _ in range(PROMPT_TOKENS))
    chain: list[bytes] = []
    extend_chain(chain, chain_root(BLOCK), prompt, BLOCK)
    figures = {"hashing 131,072 tokens, ms": _best_ms(lambda: extend_chain([], chain_root(BLOCK), prompt, BLOCK))}
    for name, num_holders in (("none has it", 0), ("one has it", 1), ("all have it", NUM_WORKERS)):
        placer = Placer("kv")
        names = [str(worker) for worker in range(NUM_WORKERS)]
        for worker, worker_id in enumerate(names):
            other = [rng.randbytes(32) for _ in range(100_000)]
            own = [bytes(bytearray(digest)) for digest in chain] if worker < num_holders else []
            runs = tuple(KvRun("added", group, (*other, *own)) for group in range(2))
            placer.add_worker(
                worker_id, WorkerInfo(worker=worker_id, max_model_len=PROMPT_TOKENS, vocab_size=1, cache=SHAPE)
            )
            kv = KvUpdate(after=1, version=1, runs=runs, whole=True)
            placer.update(worker_id, WorkerMessage(kv=kv, load=WorkerLoad(max_num_seqs=64)))
        request = Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(), seed=0)
        figures[f"place 131,072 tokens among 8, {name}, ms"] = _best_ms(lambda: placer.place(request, names))  # noqa: B023
        short = Request(request_id="s", prompt_token_ids=prompt[:2_000], params=SamplingParams(), seed=0)
        figures[f"place 2,000 tokens among 8, {name}, ms"] = _best_ms(lambda: placer.place(short, names))  # noqa: B023
    return figures


def update_costs() -> dict[str, float]:
    """Microseconds of `take_update` and of `waiting_tokens` beside a decode step of 256 sequences."""
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    scheduler = Scheduler(
        config, layout(256 * 9), block_size=BLOCK, max_model_len=PROMPT_TOKENS, enable_prefix_caching=True
    )
    rng = random.Random(2)
    for name in range(256):
        prompt = tuple(rng.randrange(50_000) for _ in range(512 + rng.randrange(16)))
        scheduler.add(
            Request(request_id=str(name), prompt_token_ids=prompt, params=SamplingParams(max_tokens=4096), seed=0)
        )
    taking, steps, loads = [], [], []
    for _ in range(200):
        begin = perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.receive(StepResult(step_id=plan.step_id, sampled_ids=[7] * sum(plan.sample)))
        stepped = perf_counter()
        scheduler.cache.take_update()
        taken = perf_counter()
        scheduler.stats()
        _ = scheduler.waiting_tokens
        loads.append(perf_counter() - taken)
        taking.append(taken - stepped)
        steps.append(stepped - begin)
    return {
        "decode step of 256 sequences, us": median(steps) * 1e6,
        "take_update per step, us (mean)": fmean(taking) * 1e6,
        "load report, us": median(loads) * 1e6,
    }


def _best_ms(work: Callable[[], object], repeats: int = 7) -> float:
    """Of this process's own time, whatever else runs."""
    times = []
    for _ in range(repeats):
        begin = process_time()
        work()
        times.append((process_time() - begin) * 1e3)
    return min(times)
