"""What the project promised of each part, beside what was found: a row a target, decided by the worst case that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
Row = dict[str, Any]  # target, wanted, figure, at (the worst case), cases, status: met, missed, reported, not measured

NO_SLOWER = 0.97  # a rival's time over ours; less is more than noise
FLASH = 1 / 1.15
FLATNESS = 1.10  # a window's time at a long context over that at a short one, at most
BROKEN = ("wrong", "failed", "crashed", "timed out")


def kernel_targets(results: Sequence[Result]) -> list[Row]:
    """Of `kernels.py`."""
    return [
        _none("every kernel correct", results, lambda result: result["status"] in BROKEN),
        _none("two runs, the same bits", results, lambda result: result.get("same_bits_twice") is False),
        _none(
            "a sequence alone and in a batch, the same bits (attention, norms, sampling, latent attention)", results,
            lambda result: result.get("same_bits_alone") is False and not result["job"].startswith("moe"),
        ),
        _share(results, "decode attention, from 64k visible tokens on", "decode", "bandwidth", 0.85),
        _rival(results, "decode attention beside FlexAttention", "decode", "flex", NO_SLOWER),
        _rival(results, "decode attention beside FlashInfer", "decode", "flashinfer", NO_SLOWER),
        _most(
            "a window's time at a long context over that at a short one", FLATNESS,
            {result["job"]: result["over_short_context"] for result in results if "over_short_context" in result},
        ),
        _share(results, "prompt attention, 8k tokens, heads of 128 (goal 0.60)", "prompt", "matrix rate", 0.45),
        _rival(results, "prompt attention beside torch's flash backend", "prompt causal head 128 tokens 8192", "flash", FLASH),
        _share(results, "kv_write", "kv_write", "bandwidth", 0.80),
        _share(results, "norms", "norm", "bandwidth", 0.80),
        _share(results, "sampling", "sample", "bandwidth", 0.80),
        _share(results, "experts in bf16, 2k tokens", "moe", "matrix rate", 0.50),
        _share(results, "experts in bf16, 1 to 16 tokens", "moe", "bandwidth", 0.70, has="bf16"),
        _share(results, "experts in MXFP4, 1 to 16 tokens, of the bytes as stored", "moe", "bandwidth", 0.70, has="mxfp4"),
    ]  # fmt: skip


def family_targets(results: Sequence[Result]) -> list[Row]:
    """Of `gpu_families.py`."""
    return [
        _none("greedy tokens equal the CPU's", results, lambda result: result["status"] in BROKEN),
        _none("two runs, the same bits", results, lambda result: result.get("same_bits_twice") is False),
        _none("a sequence alone, the same tokens", results, lambda result: bool(result.get("alone_wrong"))),
    ]


def model_targets(results: Sequence[Result]) -> list[Row]:
    """Of `gpu_models.py`: reported, since no figure was promised."""
    ours = {result["job"]: result for result in results if " transom" in result["job"]}
    rates = {result["job"]: result.get("tokens_per_s") for result in results}

    def over_rival(kind: str) -> dict[str, float]:
        """Of the engine as it is served; without graphs it is shown in the table alone."""
        pairs = {
            job: rates.get(job.replace(" transom ", " transformers ")) for job in ours if f" transom {kind}" in job
        }
        return {job: rates[job] / theirs for job, theirs in pairs.items() if rates[job] and theirs}

    served = {job: one for job, one in ours.items() if " transom " in job}
    idle = {job: one["step_s"] / one["kernels_s"] for job, one in served.items() if one.get("kernels_s")}
    floors = {job: one["share_of_floor"] for job, one in served.items() if "share_of_floor" in one}
    return [
        _none("every model runs", list(ours.values()), lambda result: result["status"] in BROKEN),
        _least("prefill, tokens/s over transformers'", None, over_rival("prefill")),
        _least("decode, tokens/s over transformers'", None, over_rival("decode")),
        _most("a step's time over the sum of its kernels'", None, idle),
        _least("share of the bandwidth floor, decode", None, floors),
    ]  # fmt: skip


def _share(results: Sequence[Result], name: str, prefix: str, of: str, least: float, *, has: str = "") -> Row:
    """Of those cases that are held to a share of a ceiling."""
    found = {
        result["job"]: result["target"]["reached"]
        for result in results
        if result["job"].startswith(prefix) and has in result["job"] and result.get("target", {}).get("of") == of
    }
    return _least(f"{name}: share of the {of}", least, found)


def _rival(results: Sequence[Result], name: str, prefix: str, rival: str, least: float) -> Row:
    found = {
        result["job"]: result["rivals"][rival]["speedup"]
        for result in results
        if result["job"].startswith(prefix) and "speedup" in (result.get("rivals") or {}).get(rival, {})
    }
    return _least(f"{name}: its time over ours", least, found)


def _none(name: str, results: Sequence[Result], is_bad: Callable[[Result], bool]) -> Row:
    """How many of those that ran are bad; none may be."""
    ran = [result for result in results if result["status"] != "skipped"]
    bad = [result["job"] for result in ran if is_bad(result)]
    status = "not measured" if not ran else "missed" if bad else "met"
    return _row(name, "0 exceptions", float(len(bad)) if ran else None, bad[0] if bad else None, len(ran), status)


def _least(name: str, least: float | None, found: Mapping[str, float]) -> Row:
    at = min(found, key=found.__getitem__, default=None)
    wanted = "" if least is None else f"at least {least:.2f}"
    return _decided(name, wanted, at, found, least is None or (at is not None and found[at] >= least), least is None)


def _most(name: str, most: float | None, found: Mapping[str, float]) -> Row:
    at = max(found, key=found.__getitem__, default=None)
    wanted = "" if most is None else f"at most {most:.2f}"
    return _decided(name, wanted, at, found, most is None or (at is not None and found[at] <= most), most is None)


def _decided(name: str, wanted: str, at: str | None, found: Mapping[str, float], is_met: bool, is_free: bool) -> Row:
    status = "not measured" if at is None else "reported" if is_free else "met" if is_met else "missed"
    return _row(name, wanted, None if at is None else found[at], at, len(found), status)


def _row(target: str, wanted: str, figure: float | None, at: str | None, cases: int, status: str) -> Row:
    return {"target": target, "wanted": wanted, "figure": figure, "at": at, "cases": cases, "status": status}
