"""How fast a cached prefix moves between two workers of one host: by each wire, beside a raw NIXL read of the same blocks.

    python -m benchmarks.serving.transfer [--model smollm2] [--tokens 1792] [--rounds 5]

Two Ray actors have a worker each, and exchange their calls and blocks through Ray as in a cluster. One computes a prompt; the other
one fetches its prefix by both wires in turn, and forgets it each time. A fetch counts from its first call until its request may be
admitted. The raw read is that of the fetch before it, without workers: descriptors, reads, and looks without a pause.
Needs `transom[transfer]`. Ratios hold on a busy machine, seconds do not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partialmethod
from typing import Any

from transom_core.contract import PrefixSource, Request, SamplingParams
from transom_core.settings.settings import Settings

MEMORY = {"kv_cache_memory_bytes": "192MiB", "swap_space": "192MiB", "max_num_seqs": 4, "dtype": "bfloat16"}
WIRES = ("nixl", "ray")


class BenchmarkWorker:
    """A worker in a Ray actor, and its worker's `PrefixPeers`: `source` is the other actor."""

    def __init__(self, model: str, name: str, source: Any = None) -> None:
        from transom_worker.replica import WorkerReplica

        config = Settings.parse(model=model, kv_transfer_wire="nixl", device="cpu", **MEMORY).engine_config()
        self._source = source
        self._replica = WorkerReplica(config, model, name, peers=self)
        self._memories = self._replica.engine.info.memories
        self._reads: Any = self._replica.engine.executor._runner.tiers._remote  # type: ignore[attr-defined]
        self._spans: Any = None  # of the last read
        spans_of = self._reads._spans

        def kept(read: Any) -> Any:
            self._spans = read, spans_of(read)
            return self._spans[1]

        self._reads._spans = kept

    async def serve(self, call: str, *args: Any) -> Any:
        """Answer a call of the other worker."""
        return await getattr(self._replica, call)(*args)

    async def _call_source(self, call: str, _: str, *args: Any) -> Any:
        return await self._source.serve.remote(call, *args)

    open_export = partialmethod(_call_source, "open_export")
    fetch_early = partialmethod(_call_source, "fetch_early")
    read_export = partialmethod(_call_source, "read_export")
    close_export = partialmethod(_call_source, "close_export")

    async def answer(self, name: str, num_tokens: int, wire: str | None = None) -> dict[str, Any]:
        """Answer a prompt with one token, with a prefix that comes by this wire; return what is known of its fetch."""
        replica, store = self._replica, self._replica.engine.transfer_store
        if wire is not None and store is not None:
            replica._thread.call(replica.engine.scheduler.cache.evict_all).result()
            store.memories = self._memories if wire == "nixl" else ()
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(100 + 7 * i % 1000 for i in range(num_tokens + 1)),
            params=SamplingParams(max_tokens=1, temperature=0.0),
            seed=1,
            prefix_source=None if wire is None else PrefixSource(worker="source", num_tokens=num_tokens // 16 * 16),
        )
        stream = replica.open_stream("benchmark")
        await anext(stream)
        await replica.submit("benchmark", [request])
        async for message in stream:
            if any(event.finish_reason is not None for event in message.events):
                break
        await stream.aclose()
        events = await replica.request_timeline(name)
        return next((event for event in events if event["what"] == "prefix_fetched"), {})

    async def raw_read(self) -> float:
        """Read once more what the last fetch read, and return the seconds. The bytes do not matter: the cache is emptied next."""
        read, spans = self._spans
        agent, begin_s = self._reads._agent, time.perf_counter()
        handles = [agent.start(read.memories[rank], kind, part, tier) for (rank, *kind, tier), part in spans.items()]
        while handles := [handle for handle in handles if agent.state(handle) == "PROC"]:
            pass
        return time.perf_counter() - begin_s


def main() -> None:
    """Print a line for each way: median seconds, GB/s, and the ratio to the raw read."""
    import ray

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--tokens", type=int, default=1792)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=512 << 20, log_to_driver=False)
    actor = ray.remote(num_cpus=1)(BenchmarkWorker)
    source = actor.remote(given.model, "source")
    target = actor.remote(given.model, "target", source)
    ray.get(source.answer.remote("warm", given.tokens))
    seconds: dict[str, list[float]] = {"raw NIXL read": [], **{wire: [] for wire in WIRES}}
    fetch: dict[str, Any] = {}
    for number in range(given.rounds + 1):  # the first round connects
        for wire in WIRES:
            fetch = ray.get(target.answer.remote(f"{wire}-{number}", given.tokens, wire))
            if fetch.get("wire") != wire:
                raise SystemExit(f"The prefix did not come by {wire}: {fetch}")
            seconds[wire].append(fetch["seconds"])
        seconds["raw NIXL read"].append(ray.get(target.raw_read.remote()))
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    print(f"{fetch['bytes'] / 1e6:.1f} MB, {given.tokens} tokens of {given.model}, medians of {given.rounds} rounds")
    for name, median in medians.items():
        ratio = median / medians["raw NIXL read"]
        print(f"{name:>14}: {1e3 * median:7.1f} ms  {fetch['bytes'] / 1e9 / median:6.2f} GB/s  {ratio:6.1f} x raw")
    ray.shutdown()


if __name__ == "__main__":
    main()
