"""A program: a worker whose first step hangs, with or without the interpreter's lock; it must be ended by its watchdog."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time

from tests.hooked_executor import HookedExecutor
from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine
from transom_worker.replica import WorkerReplica

FOR_EVER_S = 100_000


async def main(model: str, how: str) -> None:
    """Print the error event of the request, if it comes."""
    settings = Settings.parse(model=model, kv_cache_memory_bytes="4MiB", num_threads=1, step_timeout_s=2.0)
    config = settings.engine_config()
    executor = HookedExecutor(config)
    engine = build_engine(config, model_name="tiny", executor=executor)
    replica = WorkerReplica(config, "tiny", engine=engine, ends_process=True)
    stream = replica.open_stream("router")
    await anext(stream)
    hang = ctypes.PyDLL(None).sleep if how == "with the lock" else time.sleep  # PyDLL keeps the lock during a call
    executor.before_step = lambda: hang(FOR_EVER_S)
    request = Request(request_id="r", prompt_token_ids=(5, 6, 7), params=SamplingParams(max_tokens=4), seed=0)
    assert await replica.submit("router", [request]) == [None]
    async for message in stream:
        for event in message.events:
            assert event.error is not None
            print(event.error.kind, event.error.loss_cause, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
