"""Processes that are ranks of one group, each with a pipe to the test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from transom_core.errors import RankLost
from transom_worker.models.parallel.communicator import Communicator
from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id

KINDS = ("memory", "gloo")
PATIENCE_S = 120.0  # of the test with a rank; what comes within it was not waited for by a rank that has `NEVER_S`
NEVER_S = 600.0

CONTEXT = multiprocessing.get_context("forkserver")
# What ranks import: a forked one has it.
PRELOADED = [
    "pytest", "torch.distributed", "transom_worker.execution.setup.model_setup", "tests.tiny_checkpoints", "triton",
]  # fmt: skip
CONTEXT.set_forkserver_preload(PRELOADED)

Body = Callable[[Communicator, int, Connection], Any]


class RankProcess:
    """One of them; ends with the test."""

    def __init__(self, body: Body, address: str, rank: int, size: int, timeout_s: float) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        arguments = (body, theirs, address, rank, size, timeout_s)
        self._process = CONTEXT.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """The next thing that it sends; what `body` returned or raised comes last."""
        assert self._pipe.poll(PATIENCE_S), "A rank said nothing."
        value = self._pipe.recv()
        return pickle.loads(value) if isinstance(value, bytes) else value

    def send(self, value: object) -> None:
        self._pipe.send(value)

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def ranks(
    kind: str, size: int, body: Body, *, timeout_s: float = NEVER_S, come: int | None = None
) -> Iterator[list[RankProcess]]:
    """`size` ranks, or the first `come` of them, that run `body(communicator, rank, pipe)`."""
    hosts = [host_id() if kind == "memory" else str(rank) for rank in range(size)]
    rendezvous = Rendezvous(hosts)
    processes: list[RankProcess] = []
    try:
        for rank in range(size if come is None else come):
            processes.append(RankProcess(body, rendezvous.address, rank, size, timeout_s))
        yield processes
    finally:
        for process in processes:
            process.end()
        rendezvous.close()


def outcomes(kind: str, size: int, body: Body) -> list[Any]:
    """What `body` returned on each rank."""
    with ranks(kind, size, body) as processes:
        return [process.receive() for process in processes]


def _run(body: Body, pipe: Connection, address: str, rank: int, size: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    try:
        comm = connect(address, rank=rank, size=size, timeout_s=timeout_s)
        pipe.send(pickle.dumps(body(comm, rank, pipe)))  # by value: a pipe would share tensors through files
        comm.close()
    except RankLost as error:
        pipe.send(error)
