"""What runs inside a rank: it joins the others, loads its part of the model, and executes plans until it is killed."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time

from transom_worker.contract import ErrorInfo
from transom_worker.errors import StepFailed, TransomError
from transom_worker.execution.model_loading import choose_device
from transom_worker.execution.ranks.channel import RankChannel
from transom_worker.execution.ranks.messages import (
    Hello,
    KvCapacity,
    Load,
    Loaded,
    LoadProgress,
    Measure,
    OpenRendezvous,
    RankFailed,
    RankSetup,
    RankUsed,
    Ready,
    RendezvousOpened,
    RunStep,
    StepDone,
)
from transom_worker.execution.runner import ModelRunner
from transom_worker.logs import show_all_logs
from transom_worker.parallel import SINGLE_RANK, Communicator, Parallel
from transom_worker.parallel.rendezvous import Rendezvous, connect, host_id

logger = logging.getLogger("transom.worker")

PR_SET_PDEATHSIG = 1
USE_PERIOD_S = 1.0
PATIENCE = 0.9  # of the time that a step may take, before ranks that wait for one of them say which


def run_rank(setup: RankSetup, *, ip: str) -> None:
    """The whole life of a rank, in the calling thread; returns only when it cannot go on, and has told the executor why.

    `ip` is this process's address for the other ranks.
    """
    about = {"worker": setup.worker, "rank": setup.rank}
    show_all_logs(setup.config.log_format, f"rank/{setup.rank}", about)
    channel = RankChannel(setup)
    rank = _Rank(setup, channel, ip)
    try:
        rank.live()
    except Exception as error:
        if not isinstance(error, TransomError):
            logger.exception("Rank %d of %d ends.", setup.rank, setup.size)
        channel.send(RankFailed(_described(error)))
    finally:
        rank.leave()
        channel.close()


class _Rank:
    """One rank from its first message to its last."""

    def __init__(self, setup: RankSetup, channel: RankChannel, ip: str) -> None:
        self._setup, self._channel, self._ip = setup, channel, ip
        self._comm: Communicator = SINGLE_RANK
        self._meeting: Rendezvous | None = None
        self._epoch = 0
        self._use_at_s = -USE_PERIOD_S

    def live(self) -> None:
        self._channel.send(Hello(host_id(), self._ip, os.getpid()))
        load = self._meet()
        self._start(load)
        while True:
            step: RunStep = self._channel.receive()
            if step.epoch == self._epoch:
                self._execute(step)
            else:  # submitted before the executor knew of the step that failed
                self._runner.abandon(step.plan)

    def leave(self) -> None:
        """Let the others know at once that this rank does nothing any more."""
        self._comm.close()
        if self._meeting is not None:
            self._meeting.close()

    def _meet(self) -> Load:
        setup, device = self._setup, choose_device(self._setup.config.model.device).type
        message = self._channel.receive()
        if isinstance(message, OpenRendezvous):
            self._meeting = Rendezvous(message.hosts, device=device, ip=self._ip)
            self._channel.send(RendezvousOpened(self._meeting.address))
            message = self._channel.receive()
        load: Load = message
        self._comm = connect(
            load.rendezvous,
            rank=setup.rank,
            size=setup.size,
            timeout_s=PATIENCE * setup.config.ranks.step_timeout_s,
            device=device,
        )
        return load

    def _start(self, load: Load) -> None:
        parallel = Parallel(rank=self._setup.rank, size=self._setup.size, comm=self._comm)
        self._runner = ModelRunner(
            self._setup.config, parallel, ranks_on_host=load.ranks_on_host, on_progress=self._report
        )
        self._channel.send(Loaded())
        message = self._channel.receive()
        if isinstance(message, Measure):
            self._channel.send(KvCapacity(self._runner.pool_bytes()))
            message = self._channel.receive()
        self._channel.send(Ready(self._runner.allocate(message.pool_bytes)))

    def _report(self, share: float, num_bytes: int) -> None:
        self._channel.send(LoadProgress(share, num_bytes))

    def _execute(self, step: RunStep) -> None:
        try:
            result = self._runner.execute(step.plan)
        except Exception as error:
            if self._runner.in_forward:  # the others wait for this rank in the middle of a step
                raise
            self._epoch += 1
            self._runner.abandon(step.plan)
            self._channel.send(RankFailed(_described(error), step.plan.step_id))
            return
        self._tell_use()
        if self._setup.rank == 0:
            self._channel.send(StepDone(result))

    def _tell_use(self) -> None:
        """After a step, so that a rank at rest is silent; before the result, so that the first one's is heard with it."""
        now_s = time.monotonic()
        if now_s - self._use_at_s >= USE_PERIOD_S:
            self._use_at_s = now_s
            self._channel.send(RankUsed(self._runner.usage))


def _described(error: Exception) -> ErrorInfo:
    if isinstance(error, TransomError):
        return ErrorInfo.of(error)
    return ErrorInfo.of(StepFailed(f"{type(error).__name__}: {error}"))


def main() -> None:
    """A rank as a process of its own: its setup comes on standard input, whose end is this process's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    setup: RankSetup = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="transom-parent", daemon=True).start()
    _be_killed_with_parent(parent)
    run_rank(setup, ip="127.0.0.1")


def _end_with_parent() -> None:
    """Ends this process when its parent closes the pipe, as it does whatever ends it."""
    sys.stdin.buffer.read()
    os._exit(1)


def _be_killed_with_parent(parent: int) -> None:
    """On Linux the kernel ends this process with its parent even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
