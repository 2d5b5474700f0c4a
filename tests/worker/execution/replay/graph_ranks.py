"""Ranks that record their decode steps, each a process: Triton's interpreter serves one thread of a process."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from tests.graph_recorder import RecorderDevice, Recording
from tests.worker.execution.hand_scheduler import HandScheduler
from tests.worker.execution.replay.test_decode_graphs import logits_of, random_steps, runner_of
from transom_worker.execution.replay.decode_replay import ReplayMismatch
from transom_worker.models.parallel.communicator import Communicator, Parallel

SIZE, NUM_STEPS, MAX_SEQS = 2, 10, 2
LENGTHS = {"max_num_seqs": MAX_SEQS, "max_model_len": 16}


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
            recording.inside_launch = True
            recording.note_launch("all_reduce_", again)
        with _disable_current_modes():
            again()
        for recording in recordings:
            recording.inside_launch = False
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def rank_steps(comm: Communicator, rank: int, pipe: Connection) -> Any:
    """Random steps on one rank: the number of graphs, of steps that replayed one, and the logits, whole ones on rank 0."""
    from transom_worker.execution.replay.decode_graphs import DecodeGraphs

    checkpoint, fault = pipe.recv()
    device = RecorderDevice()
    capture, num_wrong = DecodeGraphs.capture, {"once": 1, "twice": 2}.get(fault, 0) if rank == 1 else 0

    def capture_wrongly(self: Any, *args: Any) -> None:
        nonlocal num_wrong
        capture(self, *args)
        if fault == "fails" and rank == 1 and len(device.graphs) == 2:
            raise RuntimeError("the capture cannot be ended")
        num_wrong -= 1
        if num_wrong >= 0:
            raise ReplayMismatch("logits differ")

    DecodeGraphs.capture = capture_wrongly  # type: ignore[method-assign]
    parallel = Parallel(rank=rank, size=SIZE, comm=RecordedComm(comm))  # type: ignore[arg-type]
    with runner_of(checkpoint, device, parallel=parallel, **LENGTHS) as runner:
        hand, logits = HandScheduler(runner.info.layout), []
        for step in random_steps(0, NUM_STEPS if fault == "none" else 0, MAX_SEQS):
            parts = comm.gather(logits_of(runner, hand, step(hand)))
            logits.append(None if parts is None else torch.cat(parts, dim=1))
        return runner.info.num_graphs, runner.usage.num_graph_steps, logits
