"""The comparison of engines, with engines that compute nothing."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from benchmarks.engine import cpu_peers
from benchmarks.engine.peers import turns
from benchmarks.engine.peers.engine import ChildRun, Engine, clean_environment
from benchmarks.engine.peers.turns import Figures
from benchmarks.json_child import Child
from tests.benchmarks import stub_engine_child


@dataclass(frozen=True, kw_only=True)
class StubEngine(Engine):
    name: ClassVar[str] = "vllm"
    seconds_per_step: float = 0.5

    def missing(self) -> str:
        return ""

    def version(self) -> str:
        return "1"

    def offline(self) -> ChildRun:
        environment = clean_environment(SECONDS_PER_STEP=str(self.seconds_per_step))
        child = Child(self.name, sys.executable, stub_engine_child.__name__, environment)
        return ChildRun(child, {"model": self.model})


class FasterEngine(StubEngine):
    name: ClassVar[str] = "transom"


class BrokenEngine(StubEngine):
    name: ClassVar[str] = "broken"


class AbsentEngine(StubEngine):
    name: ClassVar[str] = "absent"

    def missing(self) -> str:
        return "install it"


@pytest.fixture
def stub_engines(monkeypatch):
    engines = [
        StubEngine(model="m", num_threads=1),
        FasterEngine(model="m", num_threads=1, seconds_per_step=0.25),
        BrokenEngine(model="broken", num_threads=1),
        AbsentEngine(model="m", num_threads=1),
    ]
    monkeypatch.setattr(cpu_peers, "all_engines", lambda options: engines)
    monkeypatch.setattr(turns, "PAUSE_S", 0.0)


def test_figures_are_ratios_against_vllm(stub_engines, capsys):
    assert cpu_peers.main(["--quick", "--only", "decode,prefill", "--rounds", "2"]) == 1
    printed = capsys.readouterr().out
    assert "| prefill 512, tokens/s | 2 | 4 (2.00) | - |" in printed
    assert "| decode, batch 8 at 512 to 520, tokens/s | 16.0 | 32.0 (2.00) | - |" in printed
    assert "absent is left out: install it" in printed
    assert "failed: broken, load: broken: load failed: ValueError: no such model" in printed


def test_figures_pair_the_values_of_one_round():
    figures = Figures()
    row = figures.row("start")
    for number, value in enumerate((5.0, None, 10.0)):
        row.add("vllm", number, value)
    for number, value in enumerate((10.0, 1.0, 30.0)):
        row.add("transom", number, value)
    assert row.median("vllm") == 7.5
    assert row.ratio("transom", "vllm") == 2.5  # of 10 / 5 and 30 / 10; the second round has no pair
    assert row.ratio("transom", "absent") is None
    assert figures.table(["vllm", "transom", "absent"], "vllm")[-1] == "| start, tokens/s | 7.5 | 10.0 (2.50) | - |"
