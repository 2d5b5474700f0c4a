"""What a message on a Ray Serve stream costs its reader, a router, in CPU time.

    python benchmarks/stream_messages.py [--streams 200] [--rate 1000] [--grpc]

One Serve replica yields messages of workers on many streams, and this process reads them as `ServeWorkerClient` does. CPU time is
this process's, user and system, all of its threads.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated, Any

import typer

from transom_core.contract import WorkerLoad, WorkerMessage
from transom_core.contract.kv_events import KvRun, KvUpdate

MESSAGES = {
    "heartbeat": WorkerMessage(),
    "load": WorkerMessage(load=WorkerLoad(num_running=5, waiting_tokens=4000)),
    "120 changes of the index": WorkerMessage(
        kv=KvUpdate(after=1, version=121, runs=(KvRun("added", 0, tuple(os.urandom(32) for _ in range(120))),)),
        load=WorkerLoad(),
    ),
}
MEASURED_S = 4.0


def main(
    streams: Annotated[int, typer.Option()] = 200,
    rate: Annotated[float, typer.Option(help="Messages per second on all streams together.")] = 1_000.0,
    grpc: Annotated[bool, typer.Option(help="Serve's deployments talk through gRPC, as with HAProxy.")] = False,
) -> None:
    """A row for each kind of message."""
    if grpc:
        os.environ["RAY_SERVE_USE_GRPC_BY_DEFAULT"] = "1"
    import ray
    from ray import serve

    @serve.deployment(max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
    class Worker:
        async def open_stream(self, kind: str, period_s: float) -> Any:
            while True:
                await asyncio.sleep(period_s)
                yield MESSAGES[kind]

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", object_store_memory=80 * 2**20)
    handle = serve.run(Worker.bind(), route_prefix=None)  # type: ignore[attr-defined]
    try:
        for kind in MESSAGES:
            cpu_us, measured_rate = asyncio.run(measure(handle, kind, streams, streams / rate))
            print(f"| {kind} | {measured_rate:,.0f} a second | {cpu_us:.0f} us |", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


async def measure(handle: Any, kind: str, streams: int, period_s: float) -> tuple[float, float]:
    """CPU microseconds per message and messages per second."""
    num_read = 0

    async def read() -> None:
        nonlocal num_read
        async for _ in handle.options(stream=True).open_stream.remote(kind, period_s):
            num_read += 1

    tasks = [asyncio.create_task(read()) for _ in range(streams)]
    await asyncio.sleep(2.0)
    begin, begin_cpu_s, begin_s = num_read, time.process_time(), time.perf_counter()
    await asyncio.sleep(MEASURED_S)
    count, cpu_s, wall_s = num_read - begin, time.process_time() - begin_cpu_s, time.perf_counter() - begin_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return cpu_s / count * 1e6, count / wall_s


if __name__ == "__main__":
    typer.run(main)
