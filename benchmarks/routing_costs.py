"""What the prefix index, placements and index updates cost, at sizes of large deployments."""

from __future__ import annotations

import gc
import pickle
import random
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import fmean, median
from time import perf_counter, process_time, thread_time

from scheduling import layout
from transom_cluster.routing.placer import Placer
from transom_core.config import SchedulerConfig
from transom_core.contract import Request, SamplingParams, WorkerInfo, WorkerLoad, WorkerMessage
from transom_core.contract.kv_events import CacheShape, KvRun, KvUpdate
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepResult

BLOCK = 16
NUM_BLOCKS = 1_000_000
OTHER_BLOCKS = 10_000  # of each worker, beside what a benchmark's prompt has there
PROMPT_TOKENS = 131_072
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
    return index_costs() | change_costs() | place_costs() | update_costs()


def index_costs() -> dict[str, float]:
    """Bytes of the index for each block and worker: prompts that one worker has, that eight have, and that all have."""
    figures = {}
    fleet(1)  # compiles
    for name, num_workers, num_shared in (("own", 8, 0), ("8 share", 8, NUM_BLOCKS), ("200 share", 200, 50_000)):
        gc.collect()
        tracemalloc.start()
        placer = fleet(num_workers, shared=random_digests(num_shared, 0), num_own=0 if num_shared else NUM_BLOCKS // 8)
        gc.collect()
        used_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        num_blocks = sum(worker.mirror.num_blocks for worker in placer.workers.values())
        figures[f"index, {name}: bytes per block and worker"] = used_bytes / num_blocks
    return figures


def change_costs() -> dict[str, float]:
    """Of one worker with a million blocks, half in each group: its whole index, then blocks removed and added few by few."""
    digests = random_digests(NUM_BLOCKS, 0)
    half = NUM_BLOCKS // 2
    runs = (KvRun("added", 0, tuple(digests[:half])), KvRun("added", 1, tuple(digests[half:])))
    message = pickle.dumps(KvUpdate(after=0, version=NUM_BLOCKS, runs=runs, whole=True), protocol=5)
    placer = fleet(1)
    [worker] = placer.workers.values()
    whole = pickle.loads(message)
    begin = process_time()
    worker.mirror.apply(whole)
    whole_s = process_time() - begin
    figures = {
        "whole index of a million blocks, MB sent": len(message) / 1e6,
        "whole index of a million blocks, ms to apply": whole_s * 1e3,
    }
    for num_blocks in (4, 64):
        some = [tuple(digests[at : at + num_blocks]) for at in range(0, half, num_blocks)][:10_000]
        steps = [KvRun(action, 0, of_run) for action in ("removed", "added") for of_run in some]
        begin = process_time()
        for run in steps:
            update = KvUpdate(after=worker.mirror.version, version=worker.mirror.version + num_blocks, runs=(run,))
            worker.mirror.apply(update)
        figures[f"update of {num_blocks} blocks, us"] = (process_time() - begin) / len(steps) * 1e6
    return figures


def place_costs() -> dict[str, float]:
    """Milliseconds of `place` by prompt length, workers and what they have cached: the first time with the hash of the prompt, then
    without.

    mixed: all have the first 1,024 tokens, every fourth worker half of the prompt, and one in 25 all of it.
    """
    rng = random.Random(1)
    prompt = tuple(rng.randrange(200_000) for _ in range(PROMPT_TOKENS))
    chain: list[bytes] = []
    extend_chain(chain, chain_root(BLOCK), prompt, BLOCK)
    figures = {
        "hashing 131,072 tokens at the worker, ms": _best_ms(lambda: extend_chain([], chain_root(BLOCK), prompt, BLOCK))
    }
    for num_workers in (8, 200):
        for name in ("none", "mixed", "all"):
            placer = fleet(num_workers, num_own=OTHER_BLOCKS)
            for num_tokens in (2_000, PROMPT_TOKENS):
                blocks = chain[: num_tokens // BLOCK]
                for at, worker_id in enumerate(placer.workers):
                    length = len(blocks) if name == "all" or at % 25 == 0 else len(blocks) // 2 if at % 4 == 0 else 64
                    own = tuple(bytes(bytearray(digest)) for digest in blocks[: 0 if name == "none" else length])
                    runs = tuple(KvRun("added", group, own) for group in range(2))
                    version = placer.workers[worker_id].mirror.version
                    placer.update(worker_id, WorkerMessage(kv=KvUpdate(after=version, version=version + 1, runs=runs)))
                label = f"place {num_tokens:,} tokens among {num_workers}, {name} cached"
                figures[f"{label}, ms"] = _best_place_ms(placer, [(*prompt[: num_tokens - 1], at) for at in range(15)])
                figures[f"{label}, hashed before, ms"] = _best_place_ms(placer, [prompt[:num_tokens]] * 15)
    return figures


def fleet(num_workers: int, *, shared: Sequence[bytes] = (), num_own: int = 0) -> Placer:
    """A placer with workers that have the shared blocks and own ones, a half in each group."""
    placer = Placer("kv")
    for worker in range(num_workers):
        worker_id = str(worker)
        own = random_digests(num_own, worker + 1)
        runs = tuple(
            KvRun("added", group, (*map(bytes, map(bytearray, shared[group::2])), *own[group::2])) for group in range(2)
        )
        info = WorkerInfo(worker=worker_id, max_model_len=PROMPT_TOKENS, vocab_size=1, cache=SHAPE)
        placer.add_worker(worker_id, info)
        kv = KvUpdate(after=1, version=1, runs=runs, whole=True)
        placer.update(worker_id, WorkerMessage(kv=kv, load=WorkerLoad(max_num_seqs=64)))
    return placer


def random_digests(count: int, seed: int) -> list[bytes]:
    """Digests that no prompt has."""
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(count)]


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
        scheduler.cache.changes.take()
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


def _best_place_ms(placer: Placer, prompts: Sequence[tuple[int, ...]]) -> float:
    """Of this thread's own time, the least for one of the prompts."""
    names, times = list(placer.workers), []
    for at, prompt in enumerate(prompts):
        request = Request(request_id=str(at), prompt_token_ids=prompt, params=SamplingParams(), seed=0)
        begin = thread_time()
        placer.place(request, names)
        times.append((thread_time() - begin) * 1e3)
        placer.ended(request.request_id)
    return min(times)
