"""What it costs a router, and a worker, that routers know what is on the workers' disks (`python benchmarks/routing.py disk`)."""

from __future__ import annotations

import gc
import pickle
import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time

from routing_costs import BLOCK, PROMPT_TOKENS, SHAPE, _best_place_ms, random_digests
from transom_cluster.routing.placer import Placer
from transom_core.contract import WorkerInfo, WorkerLoad, WorkerMessage
from transom_core.contract.kv_events import KvRun, KvUpdate
from transom_core.kv_cache.hashing import chain_root, extend_chain
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.tiers import DEVICE, DISK, HOST
from transom_worker.kvcache.tiers.disk.folder import BlockFolder

NUM_WORKERS = 200
DISK_BLOCKS = 300_000  # 100 GiB of blocks of 360 KiB
TIERS = {"no other tier": 1, "a host tier": 2, "host and disk tier": 3}
RATES = LoadRates(200_000, (30_000, 30_000), (300_000, 300_000))  # of a GPU and a disk that reads 1.2 GB/s


def disk_costs() -> dict[str, float]:
    """Every figure by name."""
    return place_costs() | index_costs() | listing_costs()


def place_costs() -> dict[str, float]:
    """Milliseconds of `place` among 200 workers, the prompt hashed before: a tenth has the prompt in its last tier, the others its
    first 1,024 tokens on the device."""
    prompt = tuple(range(PROMPT_TOKENS))
    chain: list[bytes] = []
    extend_chain(chain, chain_root(BLOCK), prompt, BLOCK)
    figures = {}
    for name, num_tiers in TIERS.items():
        placer = fleet(num_tiers, NUM_WORKERS)
        for num_tokens in (2_000, PROMPT_TOKENS):
            for at, worker_id in enumerate(placer.workers):
                tier = num_tiers - 1 if at % 10 == 0 else DEVICE
                put(placer, worker_id, chain[: num_tokens // BLOCK] if at % 10 == 0 else chain[:64], tier)
            figures[f"place {num_tokens:,} tokens, {name}, ms"] = _best_place_ms(placer, [prompt[:num_tokens]] * 40)
    return figures


def index_costs() -> dict[str, float]:
    """Of 300,000 blocks on a disk: the message, the time to apply it, and the router's memory for each block and worker."""
    digests = random_digests(DISK_BLOCKS, 0)
    half = DISK_BLOCKS // 2
    runs = tuple(KvRun("added", group, tuple(digests[group * half :][:half]), DISK) for group in range(2))
    message = pickle.dumps(KvUpdate(after=0, version=DISK_BLOCKS, runs=runs, whole=True, rates=RATES), protocol=5)
    placer = fleet(3, 1)
    whole = pickle.loads(message)
    begin = process_time()
    placer.update("0", WorkerMessage(kv=whole))
    figures = {
        "whole index of 300,000 blocks on a disk, MB sent": len(message) / 1e6,
        "whole index of 300,000 blocks on a disk, ms to apply": (process_time() - begin) * 1e3,
    }
    for name, of_host in (("a directory of its own", 1), ("8 workers share a directory", 8)):
        gc.collect()
        tracemalloc.start()
        placer = fleet(3, 16)
        for at, worker_id in enumerate(placer.workers):
            put(placer, worker_id, random_digests(20_000, 1 + at // of_host), DISK)
        gc.collect()
        num_blocks = sum(worker.mirror.num_blocks for worker in placer.workers.values())
        figures[f"{name}: bytes per block and worker"] = tracemalloc.get_traced_memory()[0] / num_blocks
        tracemalloc.stop()
    return figures


def listing_costs(num_files: int = 50_000) -> dict[str, float]:
    """CPU milliseconds of a worker's listing of a folder with 50,000 empty files, and its memory for each."""
    with tempfile.TemporaryDirectory() as directory:
        folder = BlockFolder(Path(directory), bytes(32), space_bytes=1 << 40)
        for digest in random_digests(num_files, 0):
            path = folder._file(0, digest)
            path.parent.mkdir(exist_ok=True)
            path.touch()
        begin = process_time()
        folder.new_listing().look_at_all()
        all_s = process_time() - begin
        listing = folder.new_listing()
        tracemalloc.start()
        changes = listing.look_at_all()
        known = dict.fromkeys(digest for _, digest in changes.added)
        del changes
        used_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        listing.look_at_all()
        begin = process_time()
        for _ in range(10):
            listing.look()
        return {
            "first listing of 50,000 files, CPU ms": all_s * 1e3,
            "a round in which nothing has changed, CPU ms": (process_time() - begin) / 10 * 1e3,
            "a worker's memory for a file, bytes": used_bytes / len(known),
        }


def fleet(num_tiers: int, num_workers: int) -> Placer:
    """A placer with workers that have so many tiers, and nothing in them."""
    shape = replace(SHAPE, has_host_tier=num_tiers > 1, has_disk_tier=num_tiers > 2)
    rates = RATES if num_tiers > 2 else RATES._replace(read_ns=()) if num_tiers > 1 else None
    placer = Placer("kv")
    for worker in range(num_workers):
        info = WorkerInfo(worker=str(worker), max_model_len=PROMPT_TOKENS, vocab_size=1, cache=shape)
        placer.add_worker(str(worker), info)
        kv = KvUpdate(after=1, version=1, runs=(), whole=True, rates=rates)
        placer.update(str(worker), WorkerMessage(kv=kv, load=WorkerLoad(max_num_seqs=64)))
    return placer


def put(placer: Placer, worker_id: str, digests: Sequence[bytes], tier: int) -> None:
    """Add blocks of both groups to a worker's tier."""
    assert tier in (DEVICE, HOST, DISK)
    version = placer.workers[worker_id].mirror.version
    runs = tuple(KvRun("added", group, tuple(digests), tier) for group in range(2))
    placer.update(worker_id, WorkerMessage(kv=KvUpdate(after=version, version=version + 1, runs=runs)))
