"""Whole models of 4 to 8 billion random parameters: prefill and decode beside transformers' continuous batching, and beside what
their kernels and the device's bandwidth allow.

    PYTHONPATH=kernels:worker python benchmarks/gpu_models.py [--only WORDS] [--budget-s 440] [--quick]

Writes models.json and models.md; docs/gpu.md says what each figure means.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpu_jobs import Script, arguments_of, run_script
from gpu_results import Report, markdown, tally
from gpu_targets import model_targets

if TYPE_CHECKING:
    from transom_core.model_config.architecture import Architecture

ABOUT = "about"  # the first job
OURS, EAGER, RIVAL = "transom", "transom-eager", "transformers"  # EAGER: without CUDA graphs
BATCHES, CONTEXT, PROMPT, STEPS = (1, 8, 64, 256), 1024, 8000, 16
EAGER_BATCHES = (1, 64)  # what graphs save shows where steps are short
TINY_BATCHES, TINY_CONTEXT, TINY_PROMPT, TINY_STEPS = (1, 3), 40, 50, 4
LEFT_BEHIND_BYTES = 2 << 30  # by an engine that was closed; more, and the next one needs a process of its own

_held: dict[tuple[str, str], Any] = {}  # one engine with its model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    script = Script(
        name="models", path=__file__, first=ABOUT, jobs=job_names, answer=answer, line=_line, report=model_report,
        job_s=200.0, budget_s=440.0, counts=lambda result: RIVAL not in result["job"],
    )  # fmt: skip
    parser = arguments_of(script, __doc__)
    parser.add_argument("--quick", action="store_true", help="batches of 8 and 64")
    return run_script(script, parser.parse_args(given), given)


def job_names(options: argparse.Namespace) -> list[str]:
    """Those of one engine and model follow each other, so that it is made once; the rival's come last, for what time is left."""
    from gpu_geometries import GEOMETRIES

    batches = TINY_BATCHES if options.tiny else (8, 64) if options.quick else BATCHES
    decoding = [f"decode {batch}" for batch in batches]
    eagerly = [f"decode {batch}" for batch in batches if batch in EAGER_BATCHES]
    parts = ((OURS, ["prefill", *decoding]), (EAGER, eagerly), (RIVAL, ["prefill", *decoding]))
    return [f"{name} {engine} {one}" for engine, what in parts for name in GEOMETRIES for one in what]


def answer(options: argparse.Namespace, job: str) -> dict[str, Any]:
    """One figure."""
    import torch

    from gpu_device import clocks, describe

    device = torch.device(options.device)
    ceilings = _ceilings(options.device, options.tiny)
    if job == ABOUT:
        return {"status": "passed", "about": describe(device), "ceilings": ceilings.as_json(), "clocks": clocks(device)}
    name, engine_name, what, *rest = job.split()
    engine = _engine(name, engine_name, device, tiny=options.tiny)
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
        _held.pop((name, engine_name)).close()  # what failed a step answers nothing any more
        raise
    if engine_name != RIVAL:
        result |= _beside_ceilings(engine, ceilings, result)
    if device.type == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    return {"status": "passed", "clocks": clocks(device)} | result


def _beside_ceilings(engine: Any, ceilings: Any, result: dict[str, Any]) -> dict[str, Any]:
    if "batch" not in result:
        flops = _prompt_flops(engine.architecture, engine.weight_bytes, result["tokens"])
        share = flops / result["seconds"] / ceilings.matrix_flops_per_s
        return {"flops": flops, "share_of_matrix_rate": share}
    middle = result["context"] + result["steps"] // 2
    num_bytes = step_bytes(engine.architecture, engine.weight_bytes, result["batch"], middle)
    floor_s = num_bytes / ceilings.copy_bytes_per_s
    return {"bytes": num_bytes, "floor_s": floor_s, "share_of_floor": floor_s / result["step_s"]}


@functools.lru_cache(maxsize=1)
def _ceilings(device_name: str, tiny: bool) -> Any:
    import torch

    from gpu_device import measure_ceilings

    found = measure_ceilings(torch.device(device_name), tiny=tiny)
    _free()
    return found


def _engine(name: str, engine_name: str, device: Any, *, tiny: bool) -> Any:
    """The one that is held, or a new one in its place; None where the old one's memory did not come back."""
    import torch

    from gpu_engines import Transom
    from gpu_geometries import geometry
    from gpu_rival import Transformers

    if (name, engine_name) not in _held:
        for engine in _held.values():
            engine.close()
        _held.clear()
        _free()
        if device.type == "cuda" and torch.cuda.memory_allocated() > LEFT_BEHIND_BYTES:
            return None
        config = geometry(name, tiny=tiny)
        if engine_name == RIVAL:
            _held[name, engine_name] = Transformers(config, device)
        else:
            longest, most = (200, 4) if tiny else (8192, max(BATCHES))
            how = {"enforce_eager": engine_name == EAGER}
            _held[name, engine_name] = Transom(config, device, longest=longest, most=most, settings=how)
    return _held[name, engine_name]


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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


def _prompt_flops(architecture: Architecture, weight_bytes: int, tokens: int) -> int:
    """Of one prompt: two for every weight that a token meets (the head meets the last alone), and attention's."""
    table = 2 * architecture.vocab_size * architecture.hidden_size
    met = weight_bytes - table * (1 if architecture.tie_embeddings else 2)
    met -= int(_expert_bytes(architecture) * (1 - _used_share(architecture, 1)))
    flops = met * tokens  # two bytes a weight
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


def _line(result: dict[str, Any]) -> str:
    said = (
        f"{result['tokens_per_s']:12,.0f} tokens/s" if "tokens_per_s" in result else str(result.get("error", ""))[:100]
    )
    return f"{result['status']:8} {result['job']:36} {said}"


def model_report(options: argparse.Namespace, first: dict[str, Any], results: list[dict[str, Any]]) -> Report:
    """The table and the targets of all results; `first` is what the first job found out about the machine."""
    return Report(results=results, table=_table(first, results), targets=model_targets(results))


def _table(first: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    ceilings = first.get("ceilings") or {}
    head = f"Copies {ceilings.get('copy_bytes_per_s', 0) / 1e9:,.0f} GB/s. {tally(results)}."
    rates = {result["job"]: result.get("tokens_per_s") for result in results}
    rows = []
    for result in results:
        name, engine, what = result["job"].split(" ", 2)
        ours, rival = result.get("tokens_per_s"), rates.get(f"{name} {RIVAL} {what}") if engine != RIVAL else None
        rows.append([
            result["job"], result["status"], ours, ours / rival if ours and rival else None,
            100 * result["spread"] if "spread" in result else None, _times(1e3, result.get("step_s")),
            _times(1e3, result.get("kernels_s")), result.get("launches"), result.get("steps_replayed"),
            _times(1e3, result.get("floor_s")),
            result.get("share_of_floor"), result.get("share_of_matrix_rate"), _times(2**-30, result.get("kv_pool_bytes")),
            _times(2**-30, result.get("peak_bytes")), result.get("attention"), str(result.get("error", ""))[:120],
        ])  # fmt: skip
    columns = (
        "job", "status", "tokens/s", "over transformers", "spread %", "step ms", "kernels ms", "launches", "replayed", "floor ms",
        "of the floor", "of matrix rate", "KV pool GiB", "peak GiB", "attention", "error",
    )  # fmt: skip
    return head + "\n\n" + markdown(columns, rows)


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


if __name__ == "__main__":
    sys.exit(main())
