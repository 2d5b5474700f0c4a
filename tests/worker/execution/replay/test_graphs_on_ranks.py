"""Several ranks, each a process since Triton's interpreter serves one thread, replay the same graphs, and give up the same ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import random
from collections.abc import Callable
from multiprocessing.connection import Connection

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.graph_recorder import RecorderDevice, Recording
from tests.interpreter_speed import speed_up_interpreter
from tests.matrices import some_daily
from tests.tiny_checkpoints import tiny_llama
from tests.worker.execution.hand_scheduler import HandScheduler
from tests.worker.execution.replay import test_decode_graphs
from tests.worker.execution.replay.test_decode_graphs import FailingDevice, runner_of
from tests.worker.models.parallel.rank_processes import ranks
from transom_kernels.launch import INTERPRETED
from transom_worker.execution.replay.decode_replay import ReplayMismatch
from transom_worker.execution.runner import ModelRunner
from transom_worker.execution.step_sampling import SampledIds, StepLogits, sample_step
from transom_worker.models.parallel.communicator import Communicator, Parallel
from transom_worker.scheduling.step import StepPlan

SIZE, NUM_STEPS, MAX_SEQS = 2, 8, 2
MAX_MODEL_LEN, ONE_LEVEL = 16, 8  # contexts of two levels, and of one


def logits_of(runner: ModelRunner, hand: HandScheduler, counts: dict[int, int]) -> torch.Tensor:
    """Return a step's logits; the sequence continues with the sampled tokens."""
    kept: list[torch.Tensor] = []

    def sampled(plan: StepPlan, logits: StepLogits, *rest: Any, **what: Any) -> SampledIds:
        kept.append(logits.sampled_SV.clone())
        return sample_step(plan, logits, *rest, **what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transom_worker.execution.runner.sample_step", sampled)
        hand.run(runner, counts)
    return kept[0]


def random_steps(
    seed: int, num_steps: int, most_seqs: int, most_new: int = 5
) -> list[Callable[[HandScheduler], dict[int, int]]]:
    """Steps over sequences that come, are cut into chunks, decode together and go; each tells a scheduler, and says what to run."""
    rng = random.Random(seed)
    steps: list[Callable[[HandScheduler], dict[int, int]]] = []
    left: dict[int, int] = {}  # tokens of the prompt yet to be computed
    total: dict[int, int] = {}
    for number in range(num_steps):
        gone = [seq for seq in left if total[seq] >= 15 or (left[seq] == 0 and rng.random() < 0.1)]
        new = number if len(left) - len(gone) < most_seqs and rng.random() < 0.5 else None
        for seq in gone:
            del left[seq]
        if new is not None or not left:
            new, length = number, rng.choice((1, 3, 7, 12))
            left[new] = total[new] = length
        counts = {seq: min(rng.randint(1, most_new), num) or 1 for seq, num in left.items()}
        tokens = [rng.randint(3, 500) for _ in range(left.get(number, 0))]
        for seq, count in counts.items():
            total[seq] += left[seq] == 0
            left[seq] = max(0, left[seq] - count)

        def step(
            hand: HandScheduler,
            gone: list[int] = gone,
            new: int | None = new,
            counts: dict[int, int] = counts,
            tokens: list[int] = tokens,
        ) -> dict[int, int]:
            for seq in gone:
                hand.finish(seq)
            if new is not None:
                hand.add(new, tokens)
            return counts

        steps.append(step)
    return steps


class RecordedComm:
    """Collectives that a recorded graph repeats, as a CUDA graph repeats nccl's."""

    can_capture = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        def again() -> None:
            self._comm.all_reduce_(x)

        recordings = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recording)]
        for recording in recordings:
            recording.steps.append(again)
        if not recordings:  # a capture computes nothing, so the other ranks need not take part
            again()
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def rank_steps(comm: Communicator, rank: int, pipe: Connection) -> Any:
    """Random steps on one rank: the number of graphs, of steps that replayed one, and the logits, whole ones on rank 0."""
    from transom_worker.execution.replay.decode_graphs import DecodeGraphs

    speed_up_interpreter()  # which the import above has brought in
    checkpoint, fault, max_model_len = pipe.recv()
    num_graphs = {"fails": 1, "a mixed size fails": MAX_SEQS}.get(fault)  # until the first capture that fails
    device = FailingDevice(num_graphs) if num_graphs and rank == 1 else RecorderDevice()
    check, num_wrong = DecodeGraphs.check, {"once": 1, "twice": 2}.get(fault, 0) if rank == 1 else 0

    def check_wrongly(self: Any, *args: Any) -> None:
        nonlocal num_wrong
        check(self, *args)
        num_wrong -= 1
        if num_wrong >= 0:
            raise ReplayMismatch("logits differ")

    DecodeGraphs.check = check_wrongly  # type: ignore[method-assign,assignment]
    parallel = Parallel(rank=rank, size=SIZE, comm=RecordedComm(comm))  # type: ignore[arg-type]
    settings: dict[str, Any] = {"max_num_seqs": MAX_SEQS, "max_model_len": max_model_len}
    mixed_tokens = (6,) if "mixed" in fault else ()
    with runner_of(checkpoint, device, parallel=parallel, mixed_tokens=mixed_tokens, **settings) as runner:
        hand, logits = HandScheduler(runner.info.layout), []
        for step in random_steps(0, NUM_STEPS if fault.startswith("none") else 0, MAX_SEQS):
            parts = comm.gather(logits_of(runner, hand, step(hand)))
            logits.append(None if parts is None else torch.cat(parts, dim=1))
        return runner.info.num_graphs, runner.usage.num_graph_steps, logits


pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not set: there is a GPU")
NUM_SIZES = 4  # one or two sequences, at two levels of context


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"hidden": 48, "heads": 6, "kv_heads": 3}  # rank 0 has two of the KV heads, rank 1 has one
    return tiny_llama(tmp_path_factory.mktemp("graphed"), **test_decode_graphs.SIZE | heads)


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
