"""Several ranks replay the same graphs, and give up the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.matrices import some_daily
from tests.tiny_checkpoints import tiny_llama
from tests.worker.execution.hand_scheduler import HandScheduler
from tests.worker.execution.replay import test_decode_graphs
from tests.worker.execution.replay.graph_ranks import (
    MAX_MODEL_LEN,
    MAX_SEQS,
    NUM_STEPS,
    ONE_LEVEL,
    SIZE,
    logits_of,
    random_steps,
    rank_steps,
)
from tests.worker.models.parallel.rank_processes import ranks
from transom_kernels.launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
NUM_SIZES = 4  # one or two sequences, at two levels of context


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("graphed"), **test_decode_graphs.SIZE)


def on_ranks(checkpoint: Path, fault: str, max_model_len: int) -> list[Any]:
    with ranks("memory", SIZE, rank_steps) as processes:
        for process in processes:
            process.send((checkpoint, fault, max_model_len))
        return [process.receive() for process in processes]


@pytest.mark.parametrize(("fault", "num_mixed"), some_daily([("none", 0), ("none, mixed", 2)], daily=[("none", 0)]))
def test_ranks_replay_what_one_rank_computes(checkpoint: Path, fault: str, num_mixed: int) -> None:
    with test_decode_graphs.runner_of(checkpoint, None, max_num_seqs=MAX_SEQS, max_model_len=MAX_MODEL_LEN) as runner:
        hand = HandScheduler(runner.info.layout)
        wanted = [logits_of(runner, hand, step(hand)) for step in random_steps(0, NUM_STEPS, MAX_SEQS)]
    (num_graphs, num_replayed, logits), others = on_ranks(checkpoint, fault, MAX_MODEL_LEN)
    assert (num_graphs, num_replayed) == others[:2]
    assert num_graphs == NUM_SIZES + num_mixed
    assert num_replayed >= NUM_STEPS // (2 if num_mixed else 4)
    for ours, theirs in zip(logits, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("fault", "num_graphs"),
    some_daily(
        [("once", 2), ("twice", 1), ("fails", 0), ("a mixed size fails", 2)], daily=[("twice", 1), ("fails", 0)]
    ),
)
def test_what_fails_on_one_rank_is_given_up_by_all(checkpoint: Path, fault: str, num_graphs: int) -> None:
    """Rank 1's first graph of two is wrong once, or twice; or its second capture fails, or that of the only mixed size."""
    assert [found[:2] for found in on_ranks(checkpoint, fault, ONE_LEVEL)] == [(num_graphs, 0)] * SIZE
