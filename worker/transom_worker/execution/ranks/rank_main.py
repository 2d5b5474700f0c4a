"""Runs a rank, in a process of its own: it connects to the other ranks, loads its part of the model, and executes plans until it is
killed. `messages` lists, in order, the messages that a rank exchanges with the executor."""

import ctypes
import logging
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from transom_core.config import CoreShare, EngineConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import RequestError, StepFailed, TransomError
from transom_core.logs import show_all_logs
from transom_core.machine.cores import keep_to_share
from transom_core.machine.host_memory import freeze_objects, keep_returning_freed_memory
from transom_worker.execution.executor import ReadEnd
from transom_worker.execution.loss_causes import cause_of_error
from transom_worker.execution.ranks.channel import RankChannel
from transom_worker.execution.ranks.messages import (
    BeginRead,
    BlocksDone,
    Busy,
    Hello,
    KvCapacity,
    Load,
    LoadAdapter,
    Loaded,
    LoadProgress,
    LoadsEnded,
    Measure,
    OpenRendezvous,
    RankFailed,
    RankSetup,
    ReadBlocks,
    RendezvousOpened,
    RunStep,
    WriteBlocks,
)
from transom_worker.execution.runner import LaunchedStep
from transom_worker.execution.setup.load_progress import compile_progress
from transom_worker.execution.setup.model_loading import choose_device, used_gpu
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator, Parallel
from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id

logger = logging.getLogger("transom.worker")

PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
USAGE_PERIOD_S = 1.0
POLL_S = 5e-5  # between two checks of the device and the executor's messages; a step takes some milliseconds
# Ranks that wait in a collective give up after this share of the step timeout, so that they report which rank hangs before the
# executor's own timeout ends.
COLLECTIVE_TIMEOUT_SHARE = 0.9


def run_rank(setup: RankSetup, *, ip: str) -> None:
    """Run a rank on the calling thread. Returns only after the rank has failed and has reported the reason to the executor.

    `ip` is the address at which the other ranks reach this process.
    """
    about = {"worker": setup.worker, "rank": setup.rank}
    show_all_logs(setup.config.log_format, f"rank/{setup.rank}", about)
    keep_returning_freed_memory()
    channel = RankChannel(setup)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000)  # ns; by default every sleep of `POLL_S` takes 50 us more
    rank = _Rank(setup, channel, ip)
    try:
        rank.run()
    except Exception as error:
        if not isinstance(error, TransomError):
            logger.exception("Rank %d of %d ends.", setup.rank, setup.size)
        channel.send(RankFailed(_error_info(error)))
    finally:
        rank.close()
        channel.close()


class _Rank:
    """One rank, from its first message to its last."""

    def __init__(self, setup: RankSetup, channel: RankChannel, ip: str) -> None:
        self._setup, self._channel, self._ip = setup, channel, ip
        self._comm: Communicator = SINGLE_RANK
        self._rendezvous: Rendezvous | None = None
        self._epoch = 0
        self._usage_sent_s = -USAGE_PERIOD_S
        self._launched: LaunchedStep | None = None  # the step that the device computes
        self._read_channel: RankChannel | None = None

    def run(self) -> None:
        self._device = choose_device(self._setup.config.model.device).type
        gpu = "" if self._device == "cpu" else used_gpu()
        self._channel.send(Hello(host_id(), self._ip, os.getpid(), gpu))
        load = self._connect()
        self._start(load)
        self.serve()

    def serve(self) -> None:
        """Execute what the executor sends, until an error ends the rank."""
        while True:
            message = self._next_message()
            if isinstance(message, ReadBlocks | WriteBlocks | LoadAdapter):
                self._finish_launched()
                self._channel.send(self._blocks_done(message))
            elif isinstance(message, BeginRead):
                self._finish_launched()
                self._runner.tiers.begin_read(message.read)
            elif message.epoch == self._epoch:
                self._execute(message)
            else:  # the executor submitted this plan before it learned of the failed step
                self._runner.abandon(message.plan)

    def close(self) -> None:
        """Close the communicator, so that the other ranks learn at once that this rank has ended."""
        self._comm.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _connect(self) -> Load:
        """Open the rendezvous if the executor asks this rank to, connect to the other ranks, and return the `Load` message."""
        setup, device = self._setup, self._device
        message = self._channel.receive()
        if isinstance(message, OpenRendezvous):
            self._rendezvous = Rendezvous(message.hosts, device=device, ip=self._ip)
            self._channel.send(RendezvousOpened(self._rendezvous.address))
            message = self._channel.receive()
        load: Load = message
        self._comm = connect(
            load.rendezvous,
            rank=setup.rank,
            size=setup.size,
            timeout_s=COLLECTIVE_TIMEOUT_SHARE * setup.config.ranks.step_timeout_s,
            device=device,
        )
        return load

    def _start(self, load: Load) -> None:
        """Load the weights, allocate the KV pool, and report that the rank is ready."""
        parallel = Parallel(rank=self._setup.rank, size=self._setup.size, comm=self._comm)
        config = _on_own_cores(self._setup.config, load)
        setup = ModelSetup(
            config,
            parallel,
            ranks_on_host=load.ranks_on_host,
            index_on_host=load.index_on_host,
            on_progress=lambda share, num_bytes: self._channel.send(LoadProgress(share, num_bytes)),
            on_busy=self._send_busy,
        )
        self._channel.send(Loaded(setup.contents))
        message = self._channel.receive()
        with compile_progress(lambda num_kernels: self._send_busy()):
            if isinstance(message, Measure):
                self._channel.send(KvCapacity(setup.pool_bytes()))
                message = self._channel.receive()
            self._runner = setup.allocate(message.pool_bytes, message.contents)
        self._runner.tiers.on_read_end(self._send_read_end)
        freeze_objects()
        self._channel.send(self._runner.info)

    def _send_read_end(self, end: ReadEnd) -> None:
        """Send the end of a read. The thread of the reads calls this, and has a connection of its own for it, since only one thread
        may use a socket."""
        if self._read_channel is None:
            self._read_channel = RankChannel(self._setup, b" reads")
        self._read_channel.send(end)

    def _send_busy(self) -> None:
        self._channel.send(Busy())

    def _next_message(self) -> Any:
        """Wait for the next message. Meanwhile, finish the launched step when the device has computed it."""
        while self._launched is not None:
            if self._launched.is_done:  # before the next launch, during which the executor can work on the result
                self._finish_launched()
            elif self._channel.has_message():
                break
            else:
                time.sleep(POLL_S)
        return self._channel.receive()

    def _execute(self, step: RunStep) -> None:
        """Launch one plan, and then finish the one before it, which a GPU computes meanwhile. A CPU's plan is finished at once.
        If the launch itself will wait for the device, the plan before it is finished first, so that its result is not late.

        After a step that fails before its first collective, the rank can go on, and sends the reason after the results of earlier
        steps. If it fails later, the other ranks wait for this rank in the middle of the step, so the error ends the rank.
        """
        if self._launched is not None and self._runner.waits_in_launch(step.plan):
            self._finish_launched()
        try:
            launched = self._runner.launch(step.plan)
        except Exception as error:
            if self._runner.was_committed:
                raise
            self._finish_launched()
            self._epoch += 1
            self._runner.abandon(step.plan)
            self._channel.send(RankFailed(_error_info(error), step.plan.step_id))
            return
        self._finish_launched()
        self._launched = launched
        if not self._runner.runs_ahead:
            self._finish_launched()

    def _finish_launched(self) -> None:
        """Wait for the launched step, if there is one, and send its result."""
        if self._launched is None:
            return
        step, self._launched = self._launched, None
        result = self._runner.finish(step)
        self._send_usage()
        if self._setup.rank == 0:
            self._channel.send(result)
        elif result.loaded or result.failed or not step.plan.seq_ids:
            ended = (tuple(result.loaded), tuple(result.load_s), tuple(result.failed))
            self._channel.send(LoadsEnded(step.plan.step_id, *ended))

    def _blocks_done(self, message: ReadBlocks | WriteBlocks | LoadAdapter) -> BlocksDone:
        """Read or write blocks, or load an adapter. A call that names wrong blocks changes nothing, and its answer says so."""
        try:
            if isinstance(message, ReadBlocks):
                return BlocksDone(message.call, self._runner.tiers.read(message.tier, message.group, message.blocks))
            if isinstance(message, LoadAdapter):
                self._runner.load_adapter(message.slot, message.path)
            else:
                self._runner.tiers.write(message.tier, message.group, message.blocks, message.data)
        except (ValueError, RequestError) as error:
            return BlocksDone(message.call, refusal=str(error))
        return BlocksDone(message.call)

    def _send_usage(self) -> None:
        """Send what this rank has used, at most once a second.

        The rank sends it after a step, so that an idle rank sends nothing, and before the step's result, so that the executor
        reads both together.
        """
        now_s = time.monotonic()
        if now_s - self._usage_sent_s >= USAGE_PERIOD_S:
            self._usage_sent_s = now_s
            self._channel.send(self._runner.usage)


def _on_own_cores(config: EngineConfig, load: Load) -> EngineConfig:
    """Restrict this thread, and those that it starts, to this rank's share of the host's cores; return the config with their
    number.

    A rank does not know which cores other workers on its host use, so it takes a share only if its worker is the only one.
    """
    if config.core_share.count > 1 or choose_device(config.model.device).type != "cpu":
        return config
    cpus = keep_to_share(CoreShare(index=load.index_on_host, count=load.ranks_on_host))
    if cpus is None:
        return config
    return replace(config, num_threads=config.num_threads or len(cpus))


def _error_info(error: Exception) -> ErrorInfo:
    if isinstance(error, TransomError):
        return ErrorInfo.of(error)
    return ErrorInfo.of(StepFailed(f"{type(error).__name__}: {error}", loss_cause=cause_of_error(error)))


def main() -> None:
    """Run a rank as a process of its own. Its setup comes on standard input; when standard input closes, the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    setup: RankSetup = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="transom-parent", daemon=True).start()
    _be_killed_with_parent(parent)
    run_rank(setup, ip="127.0.0.1")


def _end_with_parent() -> None:
    """End this process when its parent closes the pipe; the pipe also closes when the parent ends, for any reason."""
    sys.stdin.buffer.read()
    os._exit(1)


def _be_killed_with_parent(parent: int) -> None:
    """On Linux, have the kernel kill this process when its parent ends, even while this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
