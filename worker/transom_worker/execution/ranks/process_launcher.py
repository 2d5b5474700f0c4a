"""Launches ranks as processes on this host, for offline use and tests.

A rank reads its setup from a pipe, its standard input, and ends when the pipe closes. So no rank outlives this process, even if it
crashes. A rank is a fresh interpreter: it runs no code of the caller's program and inherits none of its state.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from transom_core.config import EngineConfig
from transom_core.errors import ConfigError, RankLost
from transom_core.machine.gpu_checks import too_few_gpus
from transom_core.machine.gpus import VISIBLE_DEVICES, read_driver, visible_devices
from transom_core.machine.openmp import wait_variables
from transom_worker.execution.loss_causes import cause_of_exit, count_out_of_memory
from transom_worker.execution.ranks.launcher import Launcher, OnRankExit, RankExit
from transom_worker.execution.ranks.messages import RankSetup

# -P keeps the current directory off the module path, where a file could take the name of a module.
PROGRAM = (sys.executable, "-P", "-m", "transom_worker.execution.ranks.rank_main")
KILL_TIMEOUT_S = 10.0


class RankProcesses(Launcher):
    """Launches one process for each rank, each with a thread that starts the process and waits for its end.

    The thread must live as long as the process: on Linux a rank asks the kernel to kill it when the thread that started it ends.
    """

    def __init__(self) -> None:
        self._rank_processes: list[_RankProcess] = []

    @property
    def ip(self) -> str | None:
        """Return None, because all ranks are on this host."""
        return None

    def launch(self, setups: Sequence[RankSetup], on_exit: OnRankExit) -> None:
        """Start every rank's process. Raises RankLost if a process cannot be started, ConfigError if there are too few devices."""
        environments = _environments(setups[0].config, len(setups))
        self._rank_processes = [_RankProcess(*each, on_exit) for each in zip(setups, environments, strict=True)]
        for rank_process in self._rank_processes:
            rank_process.start()
        for rank_process in self._rank_processes:
            rank_process.wait_until_started()

    def kill(self) -> None:
        """Kill all processes."""
        for rank_process in self._rank_processes:
            rank_process.kill()

    def close(self) -> None:
        """Wait until all processes are gone."""
        for rank_process in self._rank_processes:
            rank_process.join(KILL_TIMEOUT_S)
        self._rank_processes = []


class _RankProcess(threading.Thread):
    """The thread that starts one rank's process and waits for its end."""

    def __init__(self, setup: RankSetup, environment: dict[str, str], on_exit: OnRankExit) -> None:
        super().__init__(name=f"transom-rank-{setup.rank}", daemon=True)
        self._setup, self._environment, self._on_exit = setup, environment, on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._error: Exception | None = None
        self._launched = threading.Event()
        self._killed = False
        self._num_out_of_memory = count_out_of_memory()

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_until_started(self) -> None:
        self._launched.wait()
        if self._error is not None:
            raise RankLost(f"Rank {self._setup.rank} cannot be started: {self._error}") from self._error

    def kill(self) -> None:
        self._killed = True
        if self.is_alive():  # the thread may be about to start the process
            self._launched.wait()
        if self._process is not None:
            self._process.kill()

    def run(self) -> None:
        try:
            self._process = self._start()
        except Exception as error:  # `wait_until_started` raises it on the thread that launches
            self._error = error
            return
        finally:
            self._launched.set()
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not self._killed:
            self._on_exit(self._setup.rank, _rank_exit(code, self._num_out_of_memory))

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            PROGRAM,
            stdin=subprocess.PIPE,
            stdout=2,  # what the rank prints must not mix with the caller's standard output
            env=self._environment,
            start_new_session=True,  # an interrupt from the keyboard must reach only the caller
            bufsize=0,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended already, and `wait` returns its exit code
            process.stdin.write(pickle.dumps(self._setup))
        return process


def _environments(config: EngineConfig, num_ranks: int) -> list[dict[str, str]]:
    """Return the environment of each rank's process.

    It is the caller's, with two changes: waiting OpenMP threads spin only for a moment, since the ranks share the cores; and on
    GPUs each rank sees only its own device.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    environment = {**os.environ, **wait_variables(os.environ)}
    if config.model.device != "cuda":
        return [environment] * num_ranks
    driver, visible = read_driver(), environment.get(VISIBLE_DEVICES)
    if driver.version:
        if problem := too_few_gpus(num_ranks, driver, f"--tensor-parallel-size {num_ranks}"):
            raise ConfigError(problem)
        devices = list(visible_devices(driver.gpus, visible))
    else:  # a container may have CUDA's library without NVML, which would tell the number of GPUs; then each rank finds out
        devices = [str(rank) for rank in range(num_ranks)] if visible is None else visible.split(",")
    return [{**environment, VISIBLE_DEVICES: "".join(devices[rank : rank + 1])} for rank in range(num_ranks)]


def _rank_exit(code: int, num_out_of_memory: int) -> RankExit | None:
    """Return how a process with this exit code ended; None for exit code 0."""
    if code == 0:
        return None
    cause = cause_of_exit(code, num_out_of_memory=num_out_of_memory)
    if code > 0:
        return RankExit(f"it ended with exit code {code}", cause)
    try:
        return RankExit(f"it was killed by {signal.Signals(-code).name}", cause)
    except ValueError:
        return RankExit(f"it was killed by signal {-code}", cause)
