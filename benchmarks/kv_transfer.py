"""What a KV transfer moves and takes, beside computing the prompt: two workers in this process, for several lengths of prompt.

    python -m benchmarks.kv_transfer --model smollm2 --lengths 256,1024,2048

Each row: the prompt's tokens; the bytes of live blocks that came; what they would be, were all tokens of windows moved; seconds
until the first token where the prefix is fetched, and where the prompt is computed. The workers share this machine's cores, and the
bytes pass through one process in place of Ray's object store; so the seconds say what reading, writing and loading cost.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cluster.router.test_transfer_engines import Cluster, at_worker, evict

from transom_core.contract import PrefixSource, Request, SamplingParams

CACHES: dict[str, dict[str, Any]] = {
    "windows of 256 in two of three layers": {"window": 256, "sinks": 4, "window_pattern": "SSF"},
    "full attention": {"window": None, "sinks": 0, "window_pattern": "S"},
}


def request(name: str, length: int) -> Request:
    return Request(
        request_id=f"{name}-{length}",
        prompt_token_ids=tuple(5 + i * 7919 % 20_000 for i in range(length)),
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        seed=0,
    )


async def first_token_s(cluster: Cluster, number: int, one: Request) -> float:
    begin_s = time.perf_counter()
    await at_worker(cluster.replicas[number], one)
    return time.perf_counter() - begin_s


async def measure(cluster: Cluster, length: int) -> tuple[int, int, float, float]:
    """Bytes moved, bytes at full length, seconds with the fetch and without it."""
    source, target = cluster.replicas
    for replica in (source, target):
        evict(replica)
    computed_s = await first_token_s(cluster, 0, request("compute", length))
    one = replace(request("fetch", length), prefix_source=PrefixSource(worker="w0", num_tokens=length // 16 * 16 - 16))
    full_before = full_length_bytes(target)
    fetched_s = await first_token_s(cluster, 1, one)
    told = [event for event in target.engine.timelines.events_of(one.request_id) if event["what"] == "prefix_fetched"]
    moved = int(told[0].get("bytes", 0))
    return moved, full_length_bytes(target) - full_before, fetched_s, computed_s


def full_length_bytes(replica: Any) -> int:
    samples = [one for family in replica.engine.metrics.registry.collect() for one in family.samples]
    return int(sum(one.value for one in samples if one.name == "transom_kv_transfer_full_length_bytes_total"))


def main() -> None:
    """Measure and print a table for each cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="256,1024,2048")
    options = parser.parse_args()
    lengths = [int(text) for text in options.lengths.split(",")]
    for name, cache in CACHES.items():
        sizes = {"kv_cache_memory_bytes": "512MiB", "swap_space": "512MiB", "kv_transfer_timeout_s": 120}
        group = {**sizes, **cache}
        cluster = Cluster(Path(options.model), group, group)
        try:
            asyncio.run(measure(cluster, lengths[0]))  # kernels are compiled, and memory is touched
            print(f"\n{name}\n\n| tokens | bytes moved | at full length | fetched, s | computed, s |")
            print("| ---: | ---: | ---: | ---: | ---: |")
            for length in lengths:
                moved, full, fetched_s, computed_s = asyncio.run(measure(cluster, length))
                print(f"| {length:,} | {moved:,} | {full:,} | {fetched_s:.2f} | {computed_s:.2f} |", flush=True)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
