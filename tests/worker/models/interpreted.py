"""Runs small models on Triton's kernels in the interpreter, and on torch's operators, to compare them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from tests.checkpoints import prompt
from tests.engine_driver import Whole, make_request, run
from tests.lost_windows import lose_windows
from tests.thread_ranks import make_sharded_engine
from transom_kernels.launch import Kernels, prefer
from transom_worker.execution.setup import dummy_run
from transom_worker.planner import CachePlan

TOLERANCE = 1e-3
BLOCK = 8
LENGTHS = (9, 26)  # the second beyond windows of 16 and 20 once it goes on, and cut in chunks
NUM_TOKENS = 4
SITUATIONS = ("cold", "hit", "repaired")
SETTINGS = {"block_size": BLOCK, "max_model_len": 64, "max_num_batched_tokens": 16, "dtype": "float32"}


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine wrote in each situation, and the logits of its steps."""

    wholes: dict[str, list[Whole]]
    logits: list[torch.Tensor]
    outcomes: dict[str, int]


@contextmanager
def kernels_of(kernels: Kernels) -> Iterator[None]:
    """Operators compute so; the interpreter, which is one for the process, serves a thread at a time."""
    lock, launch = threading.Lock(), GridExecutor.__call__

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    with prefer(kernels), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", alone)
        patch.setattr(dummy_run, "WARM_UP_TOKENS", 1)
        yield


def run_engine(
    folder: Path,
    kernels: Kernels,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    size: int = 1,
    situations: tuple[str, ...] = SITUATIONS,
    **settings: Any,
) -> Run:
    """Prompts together in chunks; all but the first again from the cache, and again with lost windows."""
    with kernels_of(kernels):
        engine, ranks = make_sharded_engine(str(folder), size, **(SETTINGS | settings))
        ranks.logits()
        wholes = {}
        for situation in situations:
            if situation == "repaired":
                lose_windows(engine.scheduler.cache)
            chosen = lengths if situation == "cold" else lengths[1:]
            requests = [make_request(f"{situation}{n}", prompt(n), max_tokens=NUM_TOKENS) for n in chosen]
            wholes[situation] = run(engine, requests)
        made = Run(wholes, ranks.logits(), dict(engine.scheduler.stats().outcome_tokens))
        engine.shutdown()
    return made


def check(
    folder: Path,
    *,
    lengths: tuple[int, int] = LENGTHS,
    size: int = 1,
    situations: tuple[str, ...] = SITUATIONS,
    **settings: Any,
) -> Run:
    """Tokens and logits are those of torch's operators on one rank."""
    wanted = run_engine(folder, "reference", lengths=lengths, situations=situations, **settings)
    got = run_engine(folder, "interpreted", lengths=lengths, size=size, situations=situations, **settings)
    if "hit" in situations:
        assert [whole.num_cached_tokens for whole in got.wholes["hit"]] == [(lengths[1] - 1) // BLOCK * BLOCK]
    for situation, wholes in wanted.wholes.items():
        assert [w.token_ids for w in got.wholes[situation]] == [w.token_ids for w in wholes], situation
    for theirs, ours in zip(wanted.logits, got.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    return got


def check_preempted(folder: Path, *, size: int = 1, **settings: Any) -> None:
    """In a pool in which not all prompts fit at once; tokens are those of torch's operators on one rank."""
    more = settings | {"enable_prefix_caching": False, "steps_in_flight": 2, "max_model_len": 40}
    wanted = _in_a_small_pool(folder, "reference", 1, more)
    assert _in_a_small_pool(folder, "interpreted", size, more) == wanted


def _in_a_small_pool(folder: Path, kernels: Kernels, size: int, settings: dict[str, Any]) -> list[list[int]]:
    plan = run_plan(folder, size, settings)
    tight = plan.request_bytes + plan.in_flight_bytes + plan.page_bytes
    with kernels_of(kernels):
        engine, _ = make_sharded_engine(str(folder), size, kv_cache_memory_bytes=tight, **(SETTINGS | settings))
        lengths = (LENGTHS[1], LENGTHS[1] - 1)
        wholes = run(engine, [make_request(f"{n}", prompt(n), max_tokens=6) for n in lengths])
        assert engine.scheduler.work.num_preemptions > 0
        engine.shutdown()
    return [whole.token_ids for whole in wholes]


def run_plan(folder: Path, size: int, settings: dict[str, Any]) -> CachePlan:
    """What such an engine plans for a roomy pool."""
    with kernels_of("reference"):
        engine, _ = make_sharded_engine(str(folder), size, **(SETTINGS | settings))
        plan = engine.info.plan
        engine.shutdown()
    return plan
