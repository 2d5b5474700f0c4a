"""The kernels' benchmark at tiny sizes, through Triton's interpreter: it runs, and it sees what is wrong."""

import argparse
import inspect
import itertools
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.engine import kernels
from benchmarks.engine.kernel_cases import experts, rivals
from benchmarks.engine.kernel_cases.attention import TINY
from benchmarks.engine.kernel_cases.case import Case, Check, Prepared
from benchmarks.engine.kernel_cases.measure import measure
from benchmarks.engine.kernel_cases.paged import expected_rows, make_paged
from benchmarks.gpu.device import Ceilings
from benchmarks.gpu.timing import Timer

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_bytes_per_s=1e9, matrix_flops_per_s=1e9)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def cases_of(scale: str) -> dict[str, Case]:
    return kernels.all_cases(argparse.Namespace(quick=scale == "quick", tiny=scale == "tiny"))


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code = kernels.main(["--device", "cpu", "--tiny", "--out", str(folder), *arguments])
    return code, json.loads((folder / "kernels.json").read_text())["results"]


@pytest.mark.exhaustive
def test_every_case_is_correct_at_tiny_sizes(tmp_path: Path) -> None:
    code, results = run(tmp_path, "--check", "--in-process")
    assert code == 0
    assert {result["status"] for result in results} == {"passed"}
    assert len(results) >= 30


@pytest.mark.parametrize("name", ["decode int8 batch 2 context 40", "host tier loads blocks of 256"])
def test_a_case_of_a_kind_is_correct(name: str) -> None:
    assert measure(cases_of("tiny")[name], CPU, None, Timer(CPU))["status"] == "passed"


def test_cases_and_rivals_are_timed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, results = run(tmp_path, "--only", "host tier spills", "--in-process")
    assert code == 0
    own, rival = results
    assert rival["job"] == f"{own['job']} beside one copy"
    assert own["bytes"] > 0
    assert own["reached"]["one copy"] == pytest.approx(rival["time_us"] / own["time_us"])
    assert "2 passed" in capfd.readouterr().out


@pytest.mark.parametrize("scale", ["full", "quick", "tiny"])
def test_cases_can_be_prepared_and_compared(scale: str) -> None:
    cases = cases_of(scale)
    for case in cases.values():
        inspect.signature(case.prepare).bind(CPU)
    assert {case.flat_with for case in cases.values()} - {None} <= set(cases)
    rivals = {promise.of for case in cases.values() for promise in case.promises} - {"bandwidth", "matrix rate"}
    assert rivals <= {"flex", "flash", "short context"}
    if scale == "full":
        assert len({promise.name for case in cases.values() for promise in case.promises}) == 11


def test_a_window_is_compared_with_a_short_context() -> None:
    short = {"job": "short", "status": "passed", "time_us": 10.0, "reached": {}}
    promises = {"flat": ["short context", 0.9]}
    long = {**short, "job": "long", "time_us": 20.0, "reached": {}, "flat_with": "short", "promises": promises}
    [row] = kernels.report([short, long])
    assert (row["status"], row["reached"], row["at"]) == ("missed", 0.5, "long")


@pytest.mark.parametrize(("starts", "counts"), [([20, 20], [1, 1]), ([0], [21])])
def test_rivals_compute_the_same(monkeypatch: pytest.MonkeyPatch, starts: list[int], counts: list[int]) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    paged = make_paged(TINY, starts, counts, CPU)
    names = rivals.DECODE_RIVALS if len(counts) > 1 else rivals.PROMPT_RIVALS
    wanted = expected_rows(paged, list(range(sum(counts))))
    for make in rivals.rivals_of(paged, names).values():
        got = cast(torch.Tensor, make()()).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=3e-2)


def test_tunings_compute_the_same() -> None:
    paged = make_paged(TINY, [20, 20], [1, 1], CPU)
    assert paged.k_cache.stride(0) == 4 * paged.k_cache[0].numel()  # a block has the keys and values of two layers
    for make in rivals.rivals_of(paged, tuple(rivals.TUNINGS)).values():
        got = cast(torch.Tensor, make()())
        torch.testing.assert_close(got.float(), expected_rows(paged, [0, 1]), atol=3e-2, rtol=3e-2)
    prepared = experts.mixture_case(experts.TINY, 5, is_mx=False).prepare(CPU)
    for make in prepared.rivals.values():
        torch.testing.assert_close(cast(tuple[torch.Tensor], make()())[0], prepared.run()[0])


def prepared_of(out: torch.Tensor, wanted: torch.Tensor, **changes: Any) -> Prepared:
    def check(found: tuple[torch.Tensor, ...]) -> list[Check]:
        return [Check(got=found[0], wanted=wanted, limit=1e-3)]

    fields: dict[str, Any] = {"run": lambda: (out,), "check": check, "num_bytes": 8}
    return Prepared(**fields | changes)


ONES = torch.ones(4)
DRIFTS = itertools.count()


@pytest.mark.parametrize(
    ("prepared", "error"),
    [
        (prepared_of(ONES, 1.1 * ONES), "differs from the reference by 0.091"),
        (prepared_of(ONES, ONES, run=lambda: (torch.empty(4),)), "differs from the reference by inf"),
        (prepared_of(ONES, ONES, run=lambda: (ONES + 1e-6 * next(DRIFTS),)), "two runs differ"),
        (
            prepared_of(ONES, ONES, alone=lambda: [(ONES, ONES + 1e-6)]),
            "a sequence's result depends on the rest of its batch",
        ),
    ],
    ids=["wrong", "not written", "not the same bits", "not alone"],
)
def test_what_is_wrong_gets_no_time(prepared: Prepared, error: str) -> None:
    case = Case(name="it", prepare=lambda device: prepared, formula="none")
    found = measure(case, CPU, CEILINGS, Timer(CPU))
    assert (found["status"], found["error"], "time_us" in found) == ("wrong", error, False)
