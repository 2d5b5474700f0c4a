"""What ranks print with lines in JSON: their own, those of libraries, and their errors, each with its rank and worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

START = """
import sys
from transom_worker.execution.ranks import process_launcher
from transom_worker.execution.ranks.ranks_executor import RanksExecutor
from transom_core.logs import show_logs
from transom_core.settings.settings import Settings

process_launcher.PROGRAM = (sys.executable, "-P", "-c", sys.argv[2])
show_logs("json", "worker/abc")
settings = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "device": "cpu", "tensor_parallel_size": 2, "log_format": "json"}
executor = RanksExecutor(Settings.parse(model=sys.argv[1], **settings).engine_config(), process_launcher.RankProcesses)
try:
    executor.start()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
executor.shutdown()
"""
RANK = """
import logging, threading, warnings
from transom_worker.execution.ranks import rank_main

class Setup(rank_main.ModelSetup):
    def allocate(self, pool_bytes, contents):
        {}
        return super().allocate(pool_bytes, contents)

rank_main.ModelSetup = Setup
rank_main.main()
"""
TALK = (
    'logging.getLogger("transom.worker").info("own"); logging.getLogger("another").warning("others"); warnings.warn("old");'
    "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()"
)


def lines_of_ranks(model: Path, what_they_do: str) -> tuple[list[dict[str, Any]], str]:
    """What two ranks write on standard error while they start, and the error that their executor raises."""
    command = [sys.executable, "-c", START, str(model), RANK.format(what_they_do)]
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]  # nothing but JSON
    return [line for line in lines if line["process"].startswith("rank/")], done.stdout


def test_every_line_of_a_rank_is_json_with_its_rank_and_worker(tiny_model: Path) -> None:
    lines, error = lines_of_ranks(tiny_model, TALK)
    assert error == ""
    assert {(line["process"], line["rank"], line["worker"]) for line in lines} == {
        ("rank/0", 0, "abc"),
        ("rank/1", 1, "abc"),
    }
    assert len({line["pid"] for line in lines}) == 2
    for rank in (0, 1):
        own, others, warning, uncaught = [line for line in lines if line["rank"] == rank]
        assert (own["level"], own["logger"], own["message"]) == ("INFO", "transom.worker", "own")
        assert (others["level"], others["logger"], others["message"]) == ("WARNING", "another", "others")
        assert (warning["level"], warning["logger"]) == ("WARNING", "py.warnings")
        assert "UserWarning: old" in warning["message"]
        assert (uncaught["level"], uncaught["logger"]) == ("CRITICAL", "transom")
        assert "ZeroDivisionError" in uncaught["exception"]


@pytest.mark.exhaustive
def test_a_ranks_error_at_start_is_json_and_its_executors(tiny_model: Path) -> None:
    """The other rank may be ended before it comes as far."""
    lines, error = lines_of_ranks(tiny_model, 'raise KeyError("broken")')
    assert "KeyError: 'broken'" in error
    assert lines
    for line in lines:
        assert (line["level"], line["message"], line["worker"]) == ("ERROR", f"Rank {line['rank']} of 2 ends.", "abc")
        assert "KeyError: 'broken'" in line["exception"]
