"""Whole models over random weights, Llama 3.1 8B and gpt-oss-20b: decode, prefill, prefix hits and mixed steps, beside what their
kernels and the device's bandwidth allow, and beside what was predicted (`roofline`).

    python -m benchmarks.gpu.models [--only WORDS] [--budget-s 440] [--quick: decode of a batch of 64 alone]

Writes models.json; docs/gpu.md says what each figure means, and that there is none of a GPU yet.
"""

import argparse
import gc
import sys
from dataclasses import asdict

import torch

from benchmarks.gpu.device import Ceilings, clocks, describe, measure_ceilings
from benchmarks.gpu.engines import RUNS, Transom
from benchmarks.gpu.geometries import geometry
from benchmarks.gpu.jobs import ABOUT, Part, Result, main
from benchmarks.gpu.roofline import SIZES, cached_bytes, predicted_step_s, prompt_flops, step_bytes
from transom_core.model_config.architecture import Architecture

GRAPHS, EAGER = "graphs", "eager"
MEASURED = ("llama", "gpt_oss")  # gpt-oss-120b is predicted alone: making its weights takes a part's time
EAGER_SIZES = ((1, 1024), (64, 1024))
PROMPT, STEPS, LONGEST = 8000, 16, 34_000
PREFIX, MORE = 32_768, 100  # tokens that are cached, and those after them
MIXED_BATCH, MIXED_STEPS, MIXED_PROMPT = 64, 32, 1024
TINY_SIZES, TINY_PROMPT, TINY_STEPS, TINY_LONGEST = ((1, 40), (3, 40)), 50, 4, 200
LEFT_BEHIND_BYTES = 2 << 30  # by an engine that was closed; more, and the next one needs a process of its own

_held: dict[tuple[str, str], Transom] = {}  # one engine with its model


def jobs(options: argparse.Namespace) -> list[str]:
    """Those of one engine and model follow each other, so that it is made once."""
    if options.quick:
        return [f"{name} {GRAPHS} decode 64 1024" for name in MEASURED]
    sizes, eager_sizes = (TINY_SIZES, TINY_SIZES[:1]) if options.tiny else (SIZES, EAGER_SIZES)
    decoding, eagerly = ([f"decode {batch} {context}" for batch, context in some] for some in (sizes, eager_sizes))
    parts = ((GRAPHS, [*decoding, "prefill", "prefix", "mixed"]), (EAGER, eagerly))
    return [f"{name} {how} {one}" for how, what in parts for name in MEASURED for one in what]


def answer(options: argparse.Namespace, job: str, about: Result) -> Result:
    """One figure."""
    device = torch.device(options.device)
    if job == ABOUT:
        ceilings = measure_ceilings(device, tiny=options.tiny)
        return {"status": "passed", **describe(device), "ceilings": asdict(ceilings)}
    name, how, what, *rest = job.split()
    engine = _engine(name, how, device, tiny=options.tiny)
    if engine is None:
        return {"status": "failed", "error": "the engine before this one left its memory behind", "fatal": True}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prompt, steps, scale = (TINY_PROMPT, TINY_STEPS, 32) if options.tiny else (PROMPT, STEPS, 1)
    try:
        match what:
            case "prefill":
                result = {"tokens": prompt} | engine.prefill(prompt)
                result["tokens_per_s"] = prompt / result["seconds"]
            case "prefix":
                result = engine.prefix_hit(PREFIX // scale // 8 if options.tiny else PREFIX, MORE // scale)
            case "mixed":
                result = engine.mixed(MIXED_BATCH // scale, MIXED_STEPS // scale, MIXED_PROMPT // scale)
            case _:
                batch, context = map(int, rest)
                needed, pool = batch * cached_bytes(engine.architecture, context + RUNS * steps), engine.kv_pool_bytes
                if needed > pool:
                    return {
                        "status": "skipped",
                        "error": f"takes {needed:,} bytes of KV cache, and the pool has {pool:,}",
                    }
                result = {"batch": batch, "context": context} | engine.decode(batch, context, steps)
    except Exception:
        _held.pop((name, how)).close()  # what failed a step answers nothing any more
        raise
    if what in ("prefill", "decode"):
        _compare(engine.architecture, engine.weight_bytes, Ceilings(**about["ceilings"]), result)
    if device.type == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return {"status": "passed", "clocks": clocks(device)} | result


def _compare(architecture: Architecture, weight_bytes: int, ceilings: Ceilings, result: Result) -> None:
    """Put beside a figure what the ceilings allow. No promise was made: shares are reported."""
    if "batch" not in result:
        result["flops"] = prompt_flops(architecture, weight_bytes, result["tokens"])
        result["reached"] = {"matrix rate": result["flops"] / result["seconds"] / ceilings.matrix_flops_per_s}
        return
    middle = result["context"] + result["steps"] // 2
    result["bytes"] = step_bytes(architecture, weight_bytes, result["batch"], middle)
    result["floor_s"] = result["bytes"] / ceilings.copy_bytes_per_s
    result["predicted_s"] = predicted_step_s(architecture, result["bytes"], ceilings.copy_bytes_per_s)
    result["reached"] = {
        "floor": result["floor_s"] / result["step_s"],
        "prediction": result["predicted_s"] / result["step_s"],
    }
    result["promises"] = {"share of the bandwidth floor, decode": ["floor", None]}
    if result.get("kernels_s"):
        result["reached"]["kernels"] = result["kernels_s"] / result["step_s"]
        result["promises"]["the sum of a step's kernels over its time"] = ["kernels", None]


def _engine(name: str, how: str, device: torch.device, *, tiny: bool) -> Transom | None:
    """The one that is held, or a new one instead; None where the old one's memory did not come back."""
    if (name, how) not in _held:
        for engine in _held.values():
            engine.close()
        _held.clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if torch.cuda.memory_allocated() > LEFT_BEHIND_BYTES:
                return None
        longest, most = (TINY_LONGEST, 4) if tiny else (LONGEST, max(batch for batch, _ in SIZES))
        config, is_eager = geometry(name, tiny=tiny), how == EAGER
        _held[name, how] = Transom(config, device, longest=longest, most=most, enforce_eager=is_eager)
    return _held[name, how]


def figure(result: Result) -> str:
    """What a line of output says of a job."""
    return f"{result['tokens_per_s']:12,.0f} tokens/s" if "tokens_per_s" in result else ""


PART = Part(
    name="models", module="benchmarks.gpu.models", jobs=jobs, answer=answer, figure=figure,
    job_s=200.0, budget_s=440.0,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(PART, __doc__))
