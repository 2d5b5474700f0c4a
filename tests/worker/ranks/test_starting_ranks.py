"""Failures while ranks start: each error names its rank, and no process or file is left.

Start-up waits for ranks as long as one of them reports progress; when it gives up, it closes everything. Ranks of a user's program:
an interrupt aborts only the running requests, and the ranks end with the program.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.worker.ranks.rank_watch import left_behind, process_ids, rank_processes_of, wait_until_gone
from transom_core.config import EngineConfig
from transom_core.errors import ModelError, RankLost
from transom_core.settings.settings import Settings
from transom_worker import LLM
from transom_worker.execution.ranks import channel, rank_startup as startup, ranks_executor as executor
from transom_worker.execution.ranks.group import RankGroup
from transom_worker.execution.ranks.launcher import Launcher, OnRankExit
from transom_worker.execution.ranks.messages import (
    Allocate,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    OpenRendezvous,
    RankSetup,
    RendezvousOpened,
    encode,
)
from transom_worker.execution.ranks.process_launcher import RankProcesses
from transom_worker.execution.ranks.ranks_executor import RanksExecutor

PROGRAM = Path(__file__).with_name("offline_program.py")


def config(model: Path, **settings: object) -> EngineConfig:
    values = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "device": "cpu", "tensor_parallel_size": 2, **settings}
    return Settings.parse(model=str(model), **values).engine_config()


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes of every start in this test."""
    found: list[int] = []

    class Watched(RankGroup):
        def __init__(self, config: EngineConfig, launcher: RankProcesses, on_lost: Callable[[], None]) -> None:
            super().__init__(config, launcher, on_lost)
            found.extend(one.process_id for one in launcher._rank_processes)

    monkeypatch.setattr(executor, "RankGroup", Watched)
    return found


def before(message: type, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Have `action` done when the first message of a kind is about to be sent."""

    def act_and_encode(sent: object) -> bytes:
        if isinstance(sent, message):
            monkeypatch.setattr(channel, "encode", encode)
            action()
        return encode(sent)

    monkeypatch.setattr(channel, "encode", act_and_encode)


@pytest.mark.exhaustive  # `test_failed_steps` kills running ranks
@pytest.mark.parametrize(("message", "rank"), [(OpenRendezvous, 1), (Load, 0), (Allocate, 1)])
def test_a_rank_killed_in_start_up(
    tiny_model: Path, pids: list[int], monkeypatch: pytest.MonkeyPatch, message: type, rank: int
) -> None:
    before(message, monkeypatch, lambda: os.kill(pids[rank], signal.SIGKILL))
    with pytest.raises(RankLost, match=rf"Rank {rank}.*(SIGKILL|died)"):
        RanksExecutor(config(tiny_model), RankProcesses).start()
    assert len(pids) == 2
    wait_until_gone(*pids)
    assert not left_behind(os.getpid())


@pytest.mark.exhaustive
def test_a_rank_that_hangs_in_start_up(tiny_model: Path, pids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before(Load, monkeypatch, lambda: os.kill(pids[1], signal.SIGSTOP))
    with pytest.raises(RankLost, match=r"Rank 1.*did not connect within"):
        RanksExecutor(config(tiny_model, step_timeout_s=1.0), RankProcesses).start()
    wait_until_gone(*pids)


def test_a_start_that_is_interrupted(tiny_model: Path, pids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank hangs in Load; shutting its worker down does not wait for it."""
    hangs, told = threading.Event(), SimpleQueue[str]()

    def hang() -> None:
        os.kill(pids[1], signal.SIGSTOP)
        hangs.set()

    def start() -> None:
        try:
            ranks.start()
        except RankLost as error:
            told.put(str(error))

    before(Load, monkeypatch, hang)
    ranks = RanksExecutor(config(tiny_model), RankProcesses)
    thread = threading.Thread(target=start)
    thread.start()
    assert hangs.wait(120)
    ranks.interrupt()
    assert "interrupted" in told.get(timeout=120)
    thread.join()
    wait_until_gone(*pids)
    assert not left_behind(os.getpid())
    with pytest.raises(RankLost, match="interrupted"):
        ranks.restart()
    wait_until_gone(*pids)


def test_a_checkpoint_that_is_wrong(tiny_model: Path, tmp_path: Path, pids: list[int]) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"Rank [01] of 2: .*model\.safetensors"):
        RanksExecutor(config(tmp_path), RankProcesses).start()
    wait_until_gone(*pids)
    assert not left_behind(os.getpid())


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


def test_ranks_that_send_nothing(tiny_model: Path) -> None:
    launcher = NoProcesses()
    with pytest.raises(RankLost, match="hangs"):
        RanksExecutor(config(tiny_model), lambda: launcher, silence_timeout_s=0.05).start()
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


def test_ranks_that_cannot_be_killed(tiny_model: Path) -> None:
    """The channel is closed all the same."""
    group = RankGroup(config(tiny_model), KillFails(), lambda: None)
    assert left_behind(os.getpid())
    with pytest.raises(OSError, match="no connection"):
        group.close()
    assert not left_behind(os.getpid())


@contextmanager
def program(model: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(model)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_an_interrupt_and_then_an_end_without_warning(tiny_model: Path) -> None:
    with program(tiny_model) as process:
        assert line(process) == "ready"
        pids = rank_processes_of(process.pid)
        assert len(pids) == 2
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does
        assert line(process) == "same"
        deadline_s = time.monotonic() + 240  # new ranks, if only some of the old had the plan that was interrupted
        while len(pids := rank_processes_of(process.pid)) != 2:
            assert time.monotonic() < deadline_s
        os.kill(pids[1], signal.SIGSTOP)  # even a rank that does not run any more
        process.kill()
        wait_until_gone(process.pid, *pids)
        assert not left_behind(process.pid)


@pytest.mark.exhaustive
def test_a_model_that_is_forgotten_leaves_no_rank(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", tensor_parallel_size=2, kv_cache_memory_bytes="8MiB", num_threads=1)
    pids = process_ids(llm.engine)
    del llm
    wait_until_gone(*pids)
    assert not left_behind(os.getpid())
