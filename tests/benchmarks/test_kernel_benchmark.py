"""The kernels' benchmark at tiny sizes, through Triton's interpreter: it runs, and it sees what is wrong."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jsonschema
import pytest
import torch

pytest.importorskip("triton")

import kernel_cases.measure
import kernels
from gpu_device import Ceilings, describe
from gpu_timing import Timer
from kernel_cases import attention, cache_writes, experts, policies, routers, rows
from kernel_cases.attention import TINY
from kernel_cases.case import Case, Check, Prepared, Scale, Target
from kernel_cases.measure import _writes_much, measure
from kernel_cases.paged import expected_rows, make_paged, poison_tails
from kernel_cases.rivals import decode_rivals, prefill_rivals
from transom_kernels.paged_attention.inputs import PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.paged_attention.rule import MaskRule

SCHEMA = Path(kernels.__file__).parent / "results" / "gpu.schema.json"
CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_bytes_per_s=1e9, matrix_flops_per_s=1e9)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = kernels.main(["--device", "cpu", "--tiny", "--in-process", "--out", str(tmp_path), *arguments])
    return code, json.loads((tmp_path / "kernels.json").read_text())


@pytest.mark.exhaustive
def test_every_case_is_correct_at_tiny_sizes(tmp_path: Path) -> None:
    code, written = run(tmp_path, "--check")
    assert code == 0
    assert {result["status"] for result in written["results"]} == {"passed"}
    assert len(written["results"]) >= 48
    jsonschema.validate(written, json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize(
    "name",
    [
        "norm with residual rows 3",
        "sample greedy rows 3",
        "latent pooling",
        "streams collapse tokens 3",
        "decode int8 batch 2 context 40",
        "prompt int4 head 16 tokens 40",
        "policy decode int4 window 20 batch 2 tokens 1",
        "policy prompt bf16 window 20 batch 1 tokens 20",
        "policy mass int8 window 20 batch 2",
        "kv_write int4 tokens 6",
        "host tier spills blocks of 256",
        "host tier loads blocks of 256",
    ],
)
def test_a_case_of_a_kind_is_correct(name: str) -> None:
    """For the kinds that no other daily test here or in test_captured_cases.py measures."""
    case = kernels.all_cases(argparse.Namespace(quick=False, tiny=True))[name]
    assert measure(case, CPU, CEILINGS, Timer(CPU), only_check=True)["status"] == "passed"


def test_times_and_a_table(tmp_path: Path) -> None:
    code, written = run(tmp_path, "--only", "decode window")
    assert code == 0
    jsonschema.validate(written, json.loads(SCHEMA.read_text()))
    assert all(result["time_us"] > 0 and result["bytes"] > 0 for result in written["results"])
    assert written["results"][1]["over_short_context"] > 0
    assert "| decode window 20 batch 2 context 90 | passed |" in (tmp_path / "kernels.md").read_text()


def test_cases_run_in_a_child_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--tiny", "--check", "--only", "block copies", "--out", str(tmp_path)]
    assert kernels.main(arguments) == 0
    assert "1 passed" in capfd.readouterr().out


def test_cases_of_all_scales_have_names_of_their_own() -> None:
    for scale in ("full", "quick"):
        found = [case for part in (attention, policies, rows, cache_writes) for case in part.cases(Scale(scale))]
        assert len({case.name for case in found}) == len(found)
        flat = {case.flat_with for case in found} - {None}
        assert flat <= {case.name for case in found}


@pytest.mark.parametrize("window", [None, 9])
def test_the_dense_answer_is_the_references(window: int | None) -> None:
    paged = make_paged(TINY, [0, 30, 17], [20, 1, 3], CPU, window=window)
    sinks = torch.randn(4)
    wanted = paged_attention_reference(
        PagedInputs(
            q=paged.q.float(), k_cache=paged.k_cache, v_cache=paged.v_cache, batch=paged.batch, scale=0.25,
            rule=MaskRule(window=window), sink_logits=sinks,
        )
    )  # fmt: skip
    got = expected_rows(paged, list(range(24)), window=window, sink_logits=sinks)
    torch.testing.assert_close(got.float(), wanted, atol=1e-4, rtol=1e-4)


def test_tails_of_blocks_are_poisoned_and_put_back() -> None:
    paged = make_paged(TINY, [16, 18], [1, 1], CPU)
    before = paged.k_cache.clone()
    restore = poison_tails(paged)
    assert int(paged.k_cache.isnan().sum()) == (15 + 13) * 2 * 16
    restore()
    assert torch.equal(paged.k_cache, before)


@pytest.mark.parametrize("scale", ["full", "quick", "tiny"])
def test_cases_can_be_prepared_with_a_device(scale: str) -> None:
    for case in kernels.all_cases(argparse.Namespace(quick=scale == "quick", tiny=scale == "tiny")).values():
        inspect.signature(case.prepare).bind(CPU)


@pytest.mark.parametrize(("starts", "counts"), [([20, 20], [1, 1]), ([0], [21])])
def test_rivals_compute_the_same(monkeypatch: pytest.MonkeyPatch, starts: list[int], counts: list[int]) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    paged = make_paged(TINY, starts, counts, CPU)
    found = decode_rivals(paged) if len(counts) > 1 else prefill_rivals(paged, with_flex=True)
    found.pop("flashinfer")  # made only where it is installed
    wanted = expected_rows(paged, list(range(sum(counts))), window=None, sink_logits=None)
    assert len(found) == 2
    for make in found.values():
        got = cast(torch.Tensor, make()()).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(got.double(), wanted, atol=3e-2, rtol=3e-2)


def test_experts_whose_gates_come_before_their_ups() -> None:
    mixture = replace(experts.TINY, interleaved=False, rule=experts.SWIGLU)
    found = status_of(experts.mixture_case(mixture, 5, is_mx=False))
    assert (found["status"], found["same_bits_alone"]) == ("passed", True)


def test_a_router_beside_torchs_operators() -> None:
    case = next(routers.cases(Scale("tiny")))
    found = status_of(case)
    assert (found["status"], found["same_bits_twice"], found["same_bits_alone"]) == ("passed", True, True)
    assert "speedup" in found["rivals"]["torch"]


def case_of(prepared: Prepared, **changes: Any) -> Case:
    return replace(Case(name="it", prepare=lambda device: prepared, formula="none"), **changes)


def prepared_of(out: torch.Tensor, wanted: torch.Tensor, **changes: Any) -> Prepared:
    return Prepared(
        run=lambda: (out,),
        check=lambda out: [Check(got=out[0], wanted=wanted, limit=1e-3)],
        num_bytes=8,
        **changes,
    )


def status_of(case: Case) -> dict[str, Any]:
    return measure(case, CPU, CEILINGS, Timer(CPU))


def test_a_wrong_result_gets_no_time() -> None:
    found = status_of(case_of(prepared_of(torch.ones(4), torch.full((4,), 1.1))))
    assert found["status"] == "wrong"
    assert "time_us" not in found


def test_what_nobody_wrote_is_wrong() -> None:
    prepared = prepared_of(torch.ones(4), torch.ones(4))
    prepared.run = lambda: (torch.empty(4),)
    assert status_of(case_of(prepared))["status"] == "wrong"
    prepared.run = lambda: (torch.ones(4).new_empty(4),)
    assert status_of(case_of(prepared))["status"] == "wrong"


def test_two_runs_must_agree_to_the_bit() -> None:
    prepared, numbers = prepared_of(torch.ones(4), torch.ones(4)), iter(range(9))
    prepared.run = lambda: (torch.ones(4) + 1e-6 * next(numbers),)
    assert status_of(case_of(prepared))["error"] == "two runs differ"


def test_a_sequence_must_not_notice_its_batch_where_that_is_promised() -> None:
    prepared = prepared_of(torch.ones(4), torch.ones(4), alone=lambda: [(torch.ones(1), torch.ones(1) + 1e-6)])
    assert status_of(case_of(prepared))["status"] == "wrong"
    found = status_of(case_of(prepared, is_invariant=False))
    assert (found["status"], found["same_bits_alone"]) == ("passed", False)


def test_a_missed_target_and_a_faster_rival_show(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Timer.time
    monkeypatch.setattr(
        Timer, "time", lambda self, work, **_: replace(real(self, work), launch="graph", seconds=1.0 if work() else 0.1)
    )
    target = Target(least=0.85, of="bandwidth")
    slow = prepared_of(torch.ones(4), torch.ones(4), rivals={"flex": lambda: lambda: None, "absent": lambda: 1 / 0})
    found = status_of(case_of(slow, target=target))
    assert found["status"] == "missed"
    assert found["rivals"]["flex"]["speedup"] == pytest.approx(0.1)
    assert "ZeroDivisionError" in found["rivals"]["absent"]["error"]
    assert status_of(case_of(slow, rival_limits={"flex": 1.0}))["behind"] == ["flex"]
    assert status_of(case_of(slow, rival_limits={"flex": 0.05}))["status"] == "passed"


@pytest.mark.parametrize(
    ("part", "words", "writes"),
    [
        (attention, "decode full batch 3", False),
        (rows, "norm with residual", True),
        (cache_writes, "kv_write tokens 6", True),
    ],
)
def test_what_writes_much_is_known_by_what_it_gives(part: ModuleType, words: str, writes: bool) -> None:
    """Before it the cache is emptied by writing, else by reading."""
    case = next(case for case in part.cases(Scale("tiny")) if words in case.name)
    assert _writes_much(case.prepare(CPU)) == writes


def test_a_rival_that_breaks_the_device_takes_nothing_from_our_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(kernel_cases.measure, "tell", lambda known: told.append(dict(known)))
    monkeypatch.setattr(kernel_cases.measure, "device_error", lambda: "CUDA error")
    found = status_of(case_of(prepared_of(torch.ones(4), torch.ones(4), rivals={"flex": lambda: 1 / 0})))
    assert (found["status"], found["fatal"]) == ("passed", True)
    assert told[0]["time_us"] == found["time_us"]
    assert told[0]["rivals"] == {}


def test_no_room_is_a_skip() -> None:
    def none(device: torch.device) -> Prepared:
        raise MemoryError("needs 70 GiB")

    found = status_of(Case(name="it", prepare=none, formula="none"))
    assert found == {"status": "skipped", "error": "needs 70 GiB"}


def test_a_device_is_described() -> None:
    assert {"date", "commit", "device", "driver", "python", "versions", "cuda"} <= set(describe(CPU))
