"""A worker that hangs ends its process, whether other Python threads can run or not.

Run as a program, this module is such a worker: its first step hangs, with or without the interpreter's lock.
"""

import asyncio
import ctypes
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hooked_executor import HookedExecutor
from transom_core.contract import Request, SamplingParams
from transom_core.settings.settings import Settings
from transom_worker.engine.startup import build_engine
from transom_worker.replica import HUNG_EXIT_CODE, WorkerReplica

FOR_EVER_S = 100_000


@pytest.mark.parametrize(
    ("how", "code", "printed"),
    [
        pytest.param("without the lock", HUNG_EXIT_CODE, "EngineDead hung\n", marks=pytest.mark.exhaustive),
        ("with the lock", 1, ""),  # no code of Python ran any more, so routers see the connection break
    ],
)
def test_a_worker_that_hangs_ends(tiny_model: Path, how: str, code: int, printed: str) -> None:
    program = [sys.executable, "-m", "tests.worker.test_hanging_worker", str(tiny_model), how]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr[-4000:]
    assert "test_hanging_worker.py" in ended.stderr  # the stacks of all threads
    assert "in receive" in ended.stderr


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
