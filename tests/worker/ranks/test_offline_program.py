"""Ranks of a user's program: an interrupt aborts only the running requests, and the ranks end with the program."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.worker.ranks.rank_watch import left_behind, process_ids, rank_processes_of, wait_until_gone
from transom_worker import LLM

PROGRAM = Path(__file__).with_name("offline_program.py")


@contextmanager
def program(model: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(model)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_an_interrupt_and_then_an_end_without_warning(tiny_model: Path) -> None:
    with program(tiny_model) as process:
        assert line(process) == "ready"
        pids = rank_processes_of(process.pid)
        assert len(pids) == 2
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does
        assert line(process) == "same"
        deadline_s = time.monotonic() + 240  # new ranks, if only some of the old had the plan that was interrupted
        while len(pids := rank_processes_of(process.pid)) != 2:
            assert time.monotonic() < deadline_s
        os.kill(pids[1], signal.SIGSTOP)  # even a rank that does not run any more
        process.kill()
        wait_until_gone(process.pid, *pids)
        assert not left_behind(process.pid)


@pytest.mark.exhaustive
def test_a_model_that_is_forgotten_leaves_no_rank(tiny_model: Path) -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": "8MiB",
        "num_threads": 1,
    }
    llm = LLM(str(tiny_model), **settings)
    pids = process_ids(llm.engine)
    del llm
    wait_until_gone(*pids)
    assert not left_behind(os.getpid())
