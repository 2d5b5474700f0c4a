"""Whole models of 8 billion random parameters: prefill and decode beside what their kernels and the device's bandwidth allow.

    python -m benchmarks.gpu.models [--only WORDS] [--budget-s 440] [--quick]

Writes models.json; docs/gpu.md says what each figure means, and that there is none of a GPU yet.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks.gpu.device import Ceilings, clocks, describe, measure_ceilings
from benchmarks.gpu.engines import Transom
from benchmarks.gpu.geometries import GEOMETRIES, geometry
from benchmarks.gpu.jobs import ABOUT, Part, Result, arguments_of, promise_rows, run_part
from transom_core.model_config.architecture import Architecture

GRAPHS, EAGER = "graphs", "eager"
BATCHES, CONTEXT, PROMPT, STEPS = (1, 8, 64, 256), 1024, 8000, 16
EAGER_BATCHES = (1, 64)  # what graphs save shows where steps are short
TINY_BATCHES, TINY_CONTEXT, TINY_PROMPT, TINY_STEPS = (1, 3), 40, 50, 4
LEFT_BEHIND_BYTES = 2 << 30  # by an engine that was closed; more, and the next one needs a process of its own

_held: dict[tuple[str, str], Transom] = {}  # one engine with its model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = arguments_of(PART, __doc__)
    parser.add_argument("--quick", action="store_true", help="batches of 8 and 64")
    return run_part(PART, parser.parse_args(given), given)


def jobs(options: argparse.Namespace) -> list[str]:
    """Those of one engine and model follow each other, so that it is made once."""
    batches = TINY_BATCHES if options.tiny else (8, 64) if options.quick else BATCHES
    decoding = [f"decode {batch}" for batch in batches]
    eagerly = [f"decode {batch}" for batch in batches if batch in EAGER_BATCHES]
    parts = ((GRAPHS, ["prefill", *decoding]), (EAGER, eagerly))
    return [f"{name} {how} {one}" for how, what in parts for name in GEOMETRIES for one in what]


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
    context, prompt, steps = (TINY_CONTEXT, TINY_PROMPT, TINY_STEPS) if options.tiny else (CONTEXT, PROMPT, STEPS)
    try:
        if what == "prefill":
            result = {"tokens": prompt} | engine.prefill(prompt)
            result["tokens_per_s"] = prompt / result["seconds"]
        else:
            result = {"batch": int(rest[0]), "context": context} | engine.decode(int(rest[0]), context, steps)
    except Exception:
        _held.pop((name, how)).close()  # what failed a step answers nothing any more
        raise
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
    result["reached"] = {"floor": result["floor_s"] / result["step_s"]}
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
        longest, most = (200, 4) if tiny else (8192, max(BATCHES))
        config, is_eager = geometry(name, tiny=tiny), how == EAGER
        _held[name, how] = Transom(config, device, longest=longest, most=most, enforce_eager=is_eager)
    return _held[name, how]


def step_bytes(architecture: Architecture, weight_bytes: int, batch: int, context: int) -> int:
    """What a decode step has to read: weights but the embedding's table, of experts those that some token is likely to choose, and
    every visible key and value."""
    read = weight_bytes
    if not architecture.tie_embeddings:
        read -= 2 * architecture.vocab_size * architecture.hidden_size
    read -= int(_expert_bytes(architecture) * (1 - _used_share(architecture, batch)))
    cached = 0
    for layer in architecture.layers:
        seen = min(context, layer.window) if layer.window else context
        cached += 2 * 2 * seen * layer.num_kv_heads * layer.head_size
    return read + batch * cached


def prompt_flops(architecture: Architecture, weight_bytes: int, tokens: int) -> int:
    """Of one prompt: two for every weight that a token meets (the head meets the last alone), and attention's."""
    table = 2 * architecture.vocab_size * architecture.hidden_size
    met = weight_bytes - table * (1 if architecture.tie_embeddings else 2)
    met -= int(_expert_bytes(architecture) * (1 - _used_share(architecture, 1)))
    flops = met * tokens  # a weight has two bytes, and takes two operations a token
    for layer in architecture.layers:
        window = min(layer.window or tokens, tokens)
        pairs = window * tokens - window * (window - 1) // 2
        flops += 4 * layer.num_heads * layer.head_size * pairs
    return flops


def _expert_bytes(architecture: Architecture) -> int:
    mixture = architecture.mixture
    if mixture is None:
        return 0
    matrices = 3 * mixture.num_experts * mixture.inner_size * architecture.hidden_size
    return 2 * matrices * architecture.num_layers  # of the geometries here, every layer has experts


def _used_share(architecture: Architecture, batch: int) -> float:
    """Of the experts, where every token chooses at random."""
    mixture = architecture.mixture
    return 1.0 if mixture is None else 1 - (1 - mixture.num_chosen / mixture.num_experts) ** batch


def line(result: Result) -> str:
    """One line of output."""
    said = str(result.get("error", ""))[:100]
    if "tokens_per_s" in result:
        said = f"{result['tokens_per_s']:12,.0f} tokens/s"
    return f"{result['status']:9} {result['job']:36} {said}"


PART = Part(
    name="models", module="benchmarks.gpu.models", jobs=jobs, answer=answer, line=line, report=promise_rows,
    job_s=200.0, budget_s=440.0,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
