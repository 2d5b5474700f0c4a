"""Looks at rank processes from outside: which there are, whether they are gone, what they left."""

import os
import select
from pathlib import Path

from transom_worker.engine.engine import Engine
from transom_worker.execution.ranks.process_launcher import PROGRAM
from transom_worker.execution.ranks.ranks_executor import RanksExecutor

GONE_TIMEOUT_S = 120.0


def process_ids(engine: Engine) -> list[int]:
    """The ranks' processes, in order of rank."""
    executor = engine.executor
    assert isinstance(executor, RanksExecutor)
    return [rank.process_id for rank in executor.ranks]


def rank_processes_of(parent: int) -> list[int]:
    """Children of a process that run a rank."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if int(status[1]) == parent and PROGRAM[-1].encode() in command:
                found.append(int(folder.name))
    return sorted(found)


def wait_until_gone(*pids: int) -> None:
    """Fails when a process is still there after a while."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(GONE_TIMEOUT_S * 1e3), f"process {pid} is still there"
        finally:
            os.close(fd)


def left_behind(pid: int) -> set[str]:
    """Local sockets of an executor in a process, and shared memory of ours."""
    sockets = {
        line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if f"@transom-{pid}-" in line
    }
    return sockets | {str(path) for path in Path("/dev/shm").iterdir() if "transom" in path.name}
