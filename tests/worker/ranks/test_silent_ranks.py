"""Start-up waits for ranks as long as one of them reports progress; when it gives up, it closes everything."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.worker.ranks.rank_watch import left_behind
from transom_core.config import EngineConfig
from transom_core.errors import RankLost
from transom_core.settings.settings import Settings
from transom_worker.execution.ranks import rank_startup as startup
from transom_worker.execution.ranks.group import RankGroup
from transom_worker.execution.ranks.launcher import Launcher, OnRankExit
from transom_worker.execution.ranks.messages import Hello, Loaded, LoadProgress, RankSetup, RendezvousOpened
from transom_worker.execution.ranks.ranks_executor import RanksExecutor

SILENCE_S = 10.0


class NoProcesses(Launcher):
    """Starts no process, so that no message ever arrives."""

    ip = None

    def __init__(self) -> None:
        self.done: list[str] = []

    def launch(self, setups: Sequence[RankSetup], on_exit: OnRankExit) -> None:
        self.done.append("launch")

    def kill(self) -> None:
        self.done.append("kill")

    def close(self) -> None:
        self.done.append("close")


class KillFails(NoProcesses):
    def kill(self) -> None:
        raise OSError("no connection")


class Script:
    """A group of two whose messages come with a pause before each, on a clock of its own."""

    size = 2

    def __init__(self, messages: list[tuple[float, int, object]], monkeypatch: pytest.MonkeyPatch) -> None:
        self._messages, self.now_s = messages, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def send(self, rank: int, message: object) -> None:
        pass

    def send_all(self, message: object) -> None:
        pass

    def receive(self, deadline_s: float) -> tuple[int, object]:
        if not self._messages or self.now_s + self._messages[0][0] > deadline_s:
            self.now_s = deadline_s
            raise RankLost("silence")
        pause_s, rank, message = self._messages.pop(0)
        self.now_s += pause_s
        return rank, message


@pytest.fixture
def config(tiny_model: Path) -> EngineConfig:
    return Settings.parse(model=str(tiny_model), device="cpu", tensor_parallel_size=2).engine_config()


def test_ranks_that_send_nothing(config: EngineConfig) -> None:
    launcher = NoProcesses()
    with pytest.raises(RankLost, match="hangs"):
        RanksExecutor(config, lambda: launcher, silence_timeout_s=0.05).start()
    assert launcher.done == ["launch", "kill", "close"]
    assert not left_behind(os.getpid())


def test_a_long_load_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank reports its progress and the other does not; silence counts from the last message of either."""
    hellos = [(1.0, rank, Hello("host", "", rank)) for rank in range(2)]
    loading = [(0.9 * SILENCE_S, 1, LoadProgress(share / 100, share)) for share in range(100)]
    script = Script([*hellos, (1.0, 0, RendezvousOpened("")), *loading, (1.0, 1, Loaded())], monkeypatch)
    with pytest.raises(RankLost, match="silence"):
        startup.start_ranks(script, timeout_s=SILENCE_S)  # type: ignore[arg-type]
    assert script.now_s == pytest.approx(4.0 + 90 * SILENCE_S + SILENCE_S)


def test_ranks_that_cannot_be_killed(config: EngineConfig) -> None:
    """The channel is closed all the same."""
    group = RankGroup(config, KillFails(), lambda: None)
    assert left_behind(os.getpid())
    with pytest.raises(OSError, match="no connection"):
        group.close()
    assert not left_behind(os.getpid())
