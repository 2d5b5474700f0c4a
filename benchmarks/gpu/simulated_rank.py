"""A rank on a simulated device, in a process of its own; `host_gaps` starts it instead of `ranks.rank_main`.

Rank 0 does all that a rank does, but for the collectives. The other ranks would do the same at the same time on cores of their
own. Here they only receive what the executor sends, so that they leave the cores to the engine and to rank 0.
"""

import os
import pickle
import sys
import threading

import numpy as np
import torch

from benchmarks.gpu.simulated_device import NoExchange, SimulatedDevice, simulate, simulated_model
from transom_worker.execution.executor import ExecutorInfo, MemoryReport
from transom_worker.execution.ranks.channel import RankChannel
from transom_worker.execution.ranks.messages import (
    Hello,
    KvCapacity,
    Load,
    Loaded,
    LoadsEnded,
    Measure,
    OpenRendezvous,
    RankSetup,
    RendezvousOpened,
    RunStep,
)
from transom_worker.execution.ranks.rank_main import _end_with_parent, _Rank
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.models.parallel.communicator import Parallel

DEVICE_FILE = "TRANSOM_SIMULATED_DEVICE"  # the variable that names the file with `SimulatedDevice.numbers`
NO_MEMORY = MemoryReport(device="simulated", weight_bytes=0, activation_bytes=0, kv_bytes=0)


def shared_numbers() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The numbers of the device, shared with the benchmark."""
    return np.memmap(os.environ[DEVICE_FILE], dtype=np.float64, mode="r+")


class FirstRank(_Rank):
    """Rank 0, without peers to connect to and without weights to load."""

    def _connect(self) -> Load:
        message = self._channel.receive()
        if isinstance(message, OpenRendezvous):
            self._channel.send(RendezvousOpened("none"))
            message = self._channel.receive()
        load: Load = message
        self._comm = NoExchange(self._setup.size)
        return load

    def _start(self, load: Load) -> None:
        config, size = self._setup.config, self._setup.size
        max_rows, device = config.scheduler.max_num_seqs, SimulatedDevice(shared_numbers())
        loaded = simulated_model(device, num_ranks=size, max_rows=max_rows)
        setup = ModelSetup(config, Parallel(rank=0, size=size, comm=self._comm), loaded=loaded)
        self._channel.send(Loaded(setup.contents))
        message = self._channel.receive()
        if isinstance(message, Measure):
            self._channel.send(KvCapacity(setup.pool_bytes()))
            message = self._channel.receive()
        self._runner = setup.allocate(message.pool_bytes, message.contents)
        simulate(self._runner, device, max_rows=max_rows)
        self._channel.send(self._runner.info)


def receive_only(channel: RankChannel) -> None:
    """Answer at start-up, and then only where the executor waits for every rank."""
    channel.send(Hello("simulated", "127.0.0.1", os.getpid()))
    while True:
        match channel.receive():
            case Load():
                channel.send(Loaded())
            case Measure():
                channel.send(KvCapacity(1 << 62))
            case RunStep(plan=plan):
                if not plan.seq_ids:
                    channel.send(LoadsEnded(plan.step_id, (), (), ()))
            case _:
                channel.send(
                    ExecutorInfo(
                        plan=None,  # type: ignore[arg-type]  # the executor reads only rank 0's
                        max_model_len=0,
                        vocab_size=0,
                        eos_token_ids=(),
                        memory=NO_MEMORY,
                    )
                )


def main() -> None:
    """Run a rank whose setup comes on standard input."""
    setup: RankSetup = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    channel = RankChannel(setup)
    if setup.rank:
        receive_only(channel)
    FirstRank(setup, channel, "127.0.0.1").run()


if __name__ == "__main__":
    main()
