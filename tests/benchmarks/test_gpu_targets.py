"""Each promise has a row, decided by the worst case that was measured."""

from __future__ import annotations

from typing import Any

import kernels
from gpu_results import Report, write
from gpu_targets import family_targets, kernel_targets, model_targets


def held(job: str, reached: float, *, of: str = "bandwidth", **more: Any) -> dict[str, Any]:
    """A result that is held to a share of a ceiling."""
    return {"job": job, "status": "passed", "target": {"of": of, "least": 0.5, "reached": reached}, **more}


def row(rows: list[dict[str, Any]], words: str) -> dict[str, Any]:
    [found] = [row for row in rows if words in row["target"]]
    return found


def test_the_worst_case_decides() -> None:
    results = [
        held("decode full batch 1 context 131072", 0.9, rivals={"flex": {"speedup": 1.2}, "flashinfer": {"error": "absent"}}),
        held("decode window 128 batch 256 context 8192", 0.8, over_short_context=1.05),
        held("moe gpt-oss bf16 tokens 2048", 0.6, of="matrix rate", same_bits_alone=False),
        held("moe gpt-oss bf16 tokens 1", 0.71),
        held("moe gpt-oss mxfp4 tokens 1", 0.4),
    ]  # fmt: skip
    rows = kernel_targets(results)
    decode = row(rows, "decode attention, from 64k")
    assert (decode["status"], decode["figure"], decode["cases"]) == ("missed", 0.8, 2)
    assert decode["at"] == "decode window 128 batch 256 context 8192"
    assert row(rows, "FlexAttention")["status"] == "met"
    assert row(rows, "FlashInfer")["status"] == "not measured"
    assert row(rows, "window's time")["status"] == "met"
    assert row(rows, "experts in bf16, 2k")["status"] == "met"
    assert row(rows, "experts in bf16, 1 to 16")["figure"] == 0.71
    assert row(rows, "MXFP4")["status"] == "missed"
    assert row(rows, "a sequence alone")["status"] == "met"


def test_what_is_wrong_is_counted() -> None:
    results: list[dict[str, Any]] = [
        {"job": "decode a", "status": "wrong", "same_bits_twice": False},
        {"job": "b", "status": "skipped"},
    ]
    rows = kernel_targets(results)
    assert row(rows, "every kernel correct")["figure"] == 1
    assert row(rows, "every kernel correct")["cases"] == 1
    assert row(rows, "two runs")["status"] == "missed"
    families = family_targets([{"job": "llama", "status": "passed", "same_bits_twice": True, "alone_wrong": 0}])
    assert [row["status"] for row in families] == ["met", "met", "met"]


def test_models_are_shown_beside_transformers(tmp_path: Any) -> None:
    def decode(engine: str, rate: float) -> dict[str, Any]:
        about = {"step_s": 0.012, "kernels_s": 0.010, "share_of_floor": 0.7} if engine != "transformers" else {}
        return {"job": f"llama {engine} decode 8", "status": "passed", "tokens_per_s": rate, **about}

    rows = model_targets([decode("transom", 900.0), decode("transom-eager", 500.0), decode("transformers", 300.0)])
    assert row(rows, "decode, tokens/s")["figure"] == 3
    assert row(rows, "decode, tokens/s")["status"] == "reported"
    assert row(rows, "prefill, tokens/s")["status"] == "not measured"
    assert abs(row(rows, "sum of its kernels")["figure"] - 1.2) < 1e-9
    path = write(tmp_path, "models", about={}, report=Report(results=[], table="", targets=rows))
    assert (
        "| decode, tokens/s over transformers' |  | 3 | reported | 1 | llama transom decode 8 |"
        in path.with_suffix(".md").read_text()
    )


def test_every_row_of_kernels_finds_its_cases() -> None:
    """Names of cases are what rows choose by."""
    import argparse

    cases = kernels.all_cases(argparse.Namespace(quick=False, tiny=False))
    results = []
    for name, case in cases.items():
        rivals = {rival: {"speedup": 1.0} for rival in ("flex", "flash", "flashinfer")}
        result = {"job": name, "status": "passed", "same_bits_twice": True, "rivals": rivals}
        if case.target is not None:
            result["target"] = {"of": case.target.of, "least": case.target.least, "reached": 1.0}
        results.append(result | ({"over_short_context": 1.0} if case.flat_with else {}))
    rows = kernel_targets(results)
    assert {found["status"] for found in rows} == {"met"}
    wanted = [case.target.least for case in cases.values() if case.target is not None]
    shares = [found for found in rows if "share of the" in found["target"]]
    assert sum(found["cases"] for found in shares) == len(wanted)
