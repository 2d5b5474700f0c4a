"""Random inputs are the same in every run, whatever ran before, and a failure names their seed."""

from __future__ import annotations

import re

import pytest

DRAWS = """
    import random
    import numpy as np
    import pytest
    import torch
    from hypothesis import given, strategies as st

    @pytest.fixture(scope="module")
    def shared():
        return torch.rand(1).item()

    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def test_first(shared):
        print("first", shared, *draws())
        assert False

    def test_second(shared):
        print("second", shared, *draws())
        assert False

    @given(st.integers())
    def test_given(number):
        print("given", torch.rand(1).item())
        assert number < 0
"""


@pytest.fixture(autouse=True)
def no_chosen_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSOM_TEST_SEED", raising=False)


def outputs(pytester: pytest.Pytester, *names: str) -> str:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    file = pytester.makepyfile(DRAWS)
    result = pytester.runpytest_inprocess("-p", "tests.seeded_inputs", *(f"{file.name}::{name}" for name in names))
    result.assert_outcomes(failed=len(names))
    return "\n".join(result.outlines)


def drawn(output: str, name: str) -> set[str]:
    return {number for line in re.findall(rf"^{name} (.*)$", output, re.MULTILINE) for number in line.split()}


def test_inputs_depend_on_the_test_alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = outputs(pytester, "test_first", "test_second"), outputs(pytester, "test_second")
    assert len(drawn(together, "second")) == 4
    assert drawn(together, "second") == drawn(alone, "second")
    assert len(drawn(together, "first") & drawn(together, "second")) == 1  # the fixture's number, which they share
    monkeypatch.setenv("TRANSOM_TEST_SEED", "7")
    assert not drawn(outputs(pytester, "test_second"), "second") & drawn(alone, "second")


def test_a_failure_names_the_seed(pytester: pytest.Pytester) -> None:
    output = outputs(pytester, "test_first", "test_second")
    seeds = re.findall(r"^Seed (\d+), made from the test's id and TRANSOM_TEST_SEED=0$", output, re.MULTILINE)
    assert len(set(seeds)) == len(seeds) == 2


def test_hypothesis_can_repeat_its_examples(pytester: pytest.Pytester) -> None:
    assert len(drawn(outputs(pytester, "test_given"), "given")) == 1
