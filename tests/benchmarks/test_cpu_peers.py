"""The comparison of engines, with engines that compute nothing."""

import os
import sys
from typing import Any

import pytest

from benchmarks.engine import cpu_peers
from benchmarks.engine.peers import turns
from benchmarks.engine.peers.engine import Engine
from benchmarks.engine.peers.turns import cell, table
from tests.benchmarks import stub_engine_child


def stub(name: str, *, missing: str = "", **settings: Any) -> Engine:
    return Engine(
        name=name,
        python=sys.executable,
        module=stub_engine_child.__name__,
        settings=settings,
        environment=dict(os.environ),
        missing=missing,
    )


def test_figures_are_ratios_against_the_first_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = [
        stub("absent", missing="install it"),
        stub("vllm", seconds_per_step=0.5),
        stub("transom", seconds_per_step=0.25),
        stub("broken"),
    ]
    monkeypatch.setattr(cpu_peers, "all_engines", lambda options: engines)
    monkeypatch.setattr(turns, "PAUSE_S", 0.0)
    assert cpu_peers.main(["--quick", "--only", "decode", "prefill", "--rounds", "2"]) == 1
    printed = capsys.readouterr().out
    assert "| prefill 512, tokens/s | 2.0 | 4.0 (2.00) | - |" in printed
    assert "| decode, batch 8 at 512 to 520, tokens/s | 16.0 | 32.0 (2.00) | - |" in printed
    assert "absent is left out: install it" in printed
    assert "failed: broken, load: broken: load failed: ValueError: no such model" in printed


def test_figures_pair_the_values_of_one_round() -> None:
    figure = {"vllm": {0: 5.0, 2: 10.0}, "transom": {0: 10.0, 1: 1.0, 2: 30.0}}
    assert cell(figure, "vllm", "vllm") == "7.5"
    assert cell(figure, "transom", "vllm") == "10.0 (2.50)"  # of 10 / 5 and 30 / 10; the second round has no pair
    assert [*table({"start": figure}, ["vllm", "absent"], "vllm")][-1] == "| start, tokens/s | 7.5 | - |"
