"""What ranks print with lines in JSON: their own, those of libraries, and uncaught errors, each with its rank and worker."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transom_core.settings.settings import Settings
from transom_worker.execution.ranks import group, process_launcher
from transom_worker.execution.ranks.ranks_executor import RanksExecutor

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


@pytest.fixture
def lines_of_ranks(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], list[dict[str, Any]]]:
    """What two ranks write on standard error while they start."""
    settings = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "device": "cpu", "tensor_parallel_size": 2}
    config = Settings.parse(model=str(tiny_model), log_format="json", **settings).engine_config()
    monkeypatch.setattr(group, "process_name", lambda: "worker/abc")

    def start(what_they_do: str) -> list[dict[str, Any]]:
        program = (sys.executable, "-P", "-c", RANK.format(what_they_do))
        monkeypatch.setattr(process_launcher, "PROGRAM", program)
        executor = RanksExecutor(config, process_launcher.RankProcesses)
        executor.start()
        executor.shutdown()
        lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]  # nothing but JSON
        return [line for line in lines if line["process"].startswith("rank/")]

    return start


def test_every_line_of_a_rank_is_json_with_its_rank_and_worker(lines_of_ranks: Any) -> None:
    lines = lines_of_ranks(TALK)
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
