"""The comparison of two variants of the engine, with children whose engines compute nothing."""

from __future__ import annotations

import json

import pytest

from benchmarks.engine import cpu_decode
from benchmarks.engine.cpu_decode import main
from tests.benchmarks import stub_engine_child


@pytest.fixture(autouse=True)
def stub_engines(monkeypatch):
    monkeypatch.setattr(cpu_decode, "CHILD", stub_engine_child.__name__)


def test_both_variants_are_measured_in_turns(tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--compare", "SECONDS_PER_STEP=0.5", "--batches", "4,1", "--contexts", "16", "--rounds", "2"]
    assert main([*arguments, "--json", str(file)]) == 0
    rows = {row["label"]: row for row in json.loads(file.read_text())["figures"]}
    first, *_ = rows
    assert first == "prefill 512"
    assert rows["decode, batch 4 at 16"]["median"] == {"SECONDS_PER_STEP=0.5": 8, "default": 16}
    assert rows["decode, batch 4 at 16"]["ratio"] == {"default": 2.0}
    assert "decode, batch 1 at 16, outside forward" in rows
    said = capsys.readouterr().out
    assert "decode, batch 4 at 16: same first tokens 3/4" in said
    assert "| decode, batch 4 at 16, tokens/s | 8.0 | 16.0 (2.00) |" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "broken"], "default: load failed: ValueError: no such model"),
        (["--contexts", "13"], "the child ended with code 3 during start"),
    ],
)
def test_a_failing_child_is_named(arguments, message, capsys):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
