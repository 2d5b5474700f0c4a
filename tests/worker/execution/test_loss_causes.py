"""Why a step failed or a process ended, as evidence against the requests that ran."""

import signal
from pathlib import Path

import pytest
import torch

from transom_core.errors import LossCause, OutOfMemory, RankLost, StepFailed
from transom_worker.execution import loss_causes
from transom_worker.execution.loss_causes import cause_of_error, cause_of_exit


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (IndexError("7"), "exception"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device_error"),
        (RuntimeError("shapes differ"), "exception"),
        (StepFailed("a step"), "exception"),
        (OutOfMemory("a step"), "out_of_memory"),
        (RankLost("a rank", loss_cause="killed"), "killed"),
    ],
)
def test_errors(error: Exception, cause: LossCause) -> None:
    assert cause_of_error(error) == cause


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        *((code, "crash") for code in (1, -signal.SIGSEGV, -signal.SIGABRT)),
        *((code, "killed") for code in (-signal.SIGKILL, -signal.SIGTERM)),
    ],
)
def test_exits(code: int, cause: LossCause, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that the kernel ended for want of memory, no signal tells; a counter does."""
    events = tmp_path / "memory.events"
    monkeypatch.setattr(loss_causes, "_CGROUP_EVENTS", events)
    events.write_text("low 0\noom 7\noom_kill 3\n")
    before = loss_causes.count_out_of_memory()
    assert before == 3
    assert cause_of_exit(code, num_out_of_memory=before) == cause
    events.write_text("low 0\noom 8\noom_kill 4\n")
    assert cause_of_exit(code, num_out_of_memory=before) == ("out_of_memory" if code == -signal.SIGKILL else cause)
