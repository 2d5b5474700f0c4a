"""The comparison of two variants of the engine, with children whose engines compute nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cpu_decode
from cpu_decode import Case, base_environment, main, read_variables
from tests.benchmarks import stub_engine_child

STUB = Path(stub_engine_child.__file__)
BENCHMARKS = Path(cpu_decode.__file__).parent


@pytest.fixture(autouse=True)
def stub_engines(monkeypatch):
    monkeypatch.setattr(cpu_decode, "CHILD", STUB)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    case = Case(8, 512, milliseconds={"reference": [10, 40, 30], "default": [5, 10, 10]})
    assert case.ratio("default", "reference") == 3
    assert case.median_ms("reference") == 30
    assert case.tokens_per_s("default") == 800
    assert case.label == "decode, batch 8 at 512"


def test_first_tokens_are_compared_sequence_by_sequence():
    case = Case(3, 16, first_tokens={"reference": [5, 6, 7], "default": [5, 9, 7]})
    assert case.same_first_tokens() == "2/3"
    assert Case(0, 512).same_first_tokens() == ""


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        ("reference", {"TRANSOM_KERNELS": "reference"}),
        ("GOMP_SPINCOUNT=2000,A=b=c", {"GOMP_SPINCOUNT": "2000", "A": "b=c"}),
    ],
)
def test_the_base_is_a_choice_of_kernels_or_variables(compare, expected):
    assert base_environment(compare) == expected


def test_variables_need_a_name():
    with pytest.raises(ValueError, match="'=3' is not NAME=VALUE"):
        read_variables(["=3"])


def test_both_variants_are_measured_in_turns(tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--compare", "SECONDS_PER_STEP=0.5", "--batches", "4,1", "--contexts", "16", "--rounds", "2"]
    assert main([*arguments, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    cases = {case["label"]: case for case in figures["cases"]}
    assert list(cases) == ["prefill 512", "decode, batch 1 at 16", "decode, batch 4 at 16"]
    assert cases["decode, batch 4 at 16"]["tokens_per_s"] == {"SECONDS_PER_STEP=0.5": 8, "default": 16}
    assert cases["decode, batch 4 at 16"]["same_first_tokens"] == "3/4"
    assert "ratio 2.00" in capsys.readouterr().out


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
