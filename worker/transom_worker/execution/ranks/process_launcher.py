"""Ranks as processes of this host, for offline use and tests.

A rank reads its setup from a pipe, its standard input, and ends when that closes: so no rank outlives this process, whatever
ended it. It is a fresh interpreter: nothing of the caller's program runs in it, and nothing of its state is inherited.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from transom_worker.errors import ConfigError, RankLost
from transom_worker.execution.ranks.launcher import Launcher, OnRankExit
from transom_worker.execution.ranks.messages import RankSetup

PROGRAM = (sys.executable, "-P", "-m", "transom_worker.execution.ranks.rank_main")
KILL_TIMEOUT_S = 10.0
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class RankProcesses(Launcher):
    """One process a rank, each with a thread that started it and waits for its end.

    That thread lives as long as this process, which matters: a rank asks the kernel to be ended with the thread that started it.
    """

    def __init__(self) -> None:
        self._keepers: list[_RankProcess] = []

    @property
    def ip(self) -> str | None:
        """All ranks are on this host."""
        return None

    def launch(self, setups: Sequence[RankSetup], on_end: OnRankExit) -> None:
        """Start every rank's process. Raises RankLost where one cannot be started, ConfigError where devices are too few."""
        environments = [_environment(setup) for setup in setups]
        self._keepers = [_RankProcess(*each, on_end) for each in zip(setups, environments, strict=True)]
        for keeper in self._keepers:
            keeper.start()
        for keeper in self._keepers:
            keeper.wait_until_started()

    def kill(self) -> None:
        """End all processes."""
        for keeper in self._keepers:
            keeper.kill()

    def close(self) -> None:
        """Wait until they are gone."""
        for keeper in self._keepers:
            keeper.join(KILL_TIMEOUT_S)
        self._keepers = []

    @property
    def process_ids(self) -> list[int]:
        """The processes of the ranks, in order."""
        return [keeper.process_id for keeper in self._keepers]


class _RankProcess(threading.Thread):
    """Starts one process and sees it end."""

    def __init__(self, setup: RankSetup, environment: dict[str, str], on_end: OnRankExit) -> None:
        super().__init__(name=f"transom-rank-{setup.rank}", daemon=True)
        self._setup, self._environment, self._on_end = setup, environment, on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._error: Exception | None = None
        self._launched = threading.Event()
        self._killed = False

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
        if self.is_alive():
            self._launched.wait()
        if self._process is not None:
            self._process.kill()

    def run(self) -> None:
        try:
            self._process = self._start()
        except Exception as error:  # whatever it is, `wait_until_started` raises it
            self._error = error
            return
        finally:
            self._launched.set()
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not self._killed:
            self._on_end(self._setup.rank, _how_it_ended(code))

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            PROGRAM,
            stdin=subprocess.PIPE,
            stdout=2,  # what it might print is no part of the caller's output
            env=self._environment,
            start_new_session=True,  # an interrupt from the keyboard is the caller's alone
            bufsize=0,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: `wait` says how
            process.stdin.write(pickle.dumps(self._setup))
        return process


def _environment(setup: RankSetup) -> dict[str, str]:
    """The caller's; without spinning threads, since ranks share cores, and on GPUs with the rank's alone in sight."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if setup.config.model.device == "cpu":
        return environment
    visible = environment.get(VISIBLE_DEVICES)
    devices = [str(rank) for rank in range(setup.size)] if visible is None else [d for d in visible.split(",") if d]
    if setup.config.model.device == "cuda" and len(devices) < setup.size:
        raise ConfigError(
            f"--tensor-parallel-size is {setup.size}, and {VISIBLE_DEVICES} is {visible}; give each rank a device of its own."
        )
    return {**environment, VISIBLE_DEVICES: devices[setup.rank] if setup.rank < len(devices) else ""}


def _how_it_ended(code: int) -> str | None:
    if code == 0:
        return None
    if code > 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
