"""Whole models of 1 to 8 billion random parameters: prefill and decode beside transformers' continuous batching, and beside what
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_jobs import run_jobs, serve
from gpu_results import is_sound, markdown, tally, write

if TYPE_CHECKING:
    from transom_worker.models.architecture import Architecture

JOB_S = 100.0
LOCAL = Path(__file__).parent / "results" / "local"
ABOUT = "about"  # the first job
ENGINES = ("transom", "transformers")
BATCHES, CONTEXT, PROMPT, STEPS = (1, 8, 64, 256), 1024, 8000, 32
TINY_BATCHES, TINY_CONTEXT, TINY_PROMPT, TINY_STEPS = (1, 3), 40, 50, 4

_held: dict[tuple[str, str], Any] = {}  # one engine with its model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    if options.child:
        serve(functools.partial(answer, options))
        return 0
    words = options.only.split()
    jobs = [ABOUT, *(job for job in job_names(options) if all(word in job for word in words))]
    command, found = [sys.executable, __file__, *given, "--child"], []
    for result in run_jobs(command, jobs, budget_s=options.budget_s, job_s=JOB_S):
        found.append(result)
        said = (
            f"{result['tokens_per_s']:12,.0f} tokens/s"
            if "tokens_per_s" in result
            else str(result.get("error", ""))[:100]
        )
        print(f"{result['status']:8} {result['job']:36} {said}", flush=True)
    first, results = found[0], found[1:]
    about = first.get("about", {}) | {"ceilings": first.get("ceilings"), "clocks": first.get("clocks")}
    path = write(options.out, "models", about=about, results=results, table=_table(first, results))
    print(f"{tally(results)}; {path}")
    return 0 if is_sound([result for result in found if "transformers" not in result["job"]]) else 1


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="jobs whose name holds all of these words")
    parser.add_argument("--quick", action="store_true", help="batches of 8 and 64")
    parser.add_argument("--tiny", action="store_true", help="models that a CPU runs in seconds")
    parser.add_argument("--budget-s", type=float, default=440.0)
    parser.add_argument("--out", type=Path, default=LOCAL)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def job_names(options: argparse.Namespace) -> list[str]:
    """Those of one engine and model follow each other, so that it is made once; the rival's come last, for what time is left."""
    from gpu_geometries import GEOMETRIES

    batches = TINY_BATCHES if options.tiny else (8, 64) if options.quick else BATCHES
    what = ["prefill", *(f"decode {batch}" for batch in batches)]
    return [f"{name} {engine} {one}" for engine in ENGINES for name in GEOMETRIES for one in what]


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
    context, prompt, steps = (TINY_CONTEXT, TINY_PROMPT, TINY_STEPS) if options.tiny else (CONTEXT, PROMPT, STEPS)
    result: dict[str, Any] = {"status": "passed", "clocks": clocks(device)}
    if what == "prefill":
        result |= {"tokens": prompt} | engine.prefill(prompt)
        result["tokens_per_s"] = prompt / result["seconds"]
        if engine_name == "transom":
            flops = _prompt_flops(engine.architecture, engine.weight_bytes, prompt)
            result |= {"flops": flops, "share_of_matrix_rate": flops / result["seconds"] / ceilings.matrix_flops_per_s}
        return result
    batch = int(rest[0])
    result |= {"batch": batch, "context": context} | engine.decode(batch, context, steps)
    if engine_name == "transom":
        num_bytes = step_bytes(engine.architecture, engine.weight_bytes, batch, context + steps // 2)
        floor_s = num_bytes / ceilings.copy_bytes_per_s
        result |= {"bytes": num_bytes, "floor_s": floor_s, "share_of_floor": floor_s / result["step_s"]}
    return result


@functools.lru_cache(maxsize=1)
def _ceilings(device_name: str, tiny: bool) -> Any:
    import torch

    from gpu_device import measure_ceilings

    found = measure_ceilings(torch.device(device_name), tiny=tiny)
    _free()
    return found


def _engine(name: str, engine_name: str, device: Any, *, tiny: bool) -> Any:
    """The one that is held, or a new one in its place."""
    from gpu_engines import Transformers, Transom
    from gpu_geometries import geometry

    if (name, engine_name) not in _held:
        for engine in _held.values():
            engine.close()
        _held.clear()
        _free()
        config = geometry(name, tiny=tiny)
        if engine_name == "transom":
            longest, most = (200, 4) if tiny else (8192, max(BATCHES))
            _held[name, engine_name] = Transom(config, device, longest=longest, most=most)
        else:
            _held[name, engine_name] = Transformers(config, device)
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


def _table(first: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    ceilings = first.get("ceilings") or {}
    head = f"Copies {ceilings.get('copy_bytes_per_s', 0) / 1e9:,.0f} GB/s. {tally(results)}."
    rivals = {result["job"]: result.get("tokens_per_s") for result in results}
    rows = []
    for result in results:
        rival = rivals.get(result["job"].replace("transom", "transformers")) if "transom " in result["job"] else None
        ours, step_s = result.get("tokens_per_s"), result.get("step_s")
        rows.append([
            result["job"], result["status"], ours, _over(ours, rival), step_s and 1e3 * step_s,
            result.get("kernels_s") and 1e3 * result["kernels_s"], result.get("launches"),
            result.get("floor_s") and 1e3 * result["floor_s"], result.get("share_of_floor"), result.get("share_of_matrix_rate"),
            result.get("attention"), str(result.get("error", ""))[:120],
        ])  # fmt: skip
    columns = (
        "job", "status", "tokens/s", "over transformers", "step ms", "kernels ms", "launches", "floor ms", "of the floor",
        "of matrix rate", "attention", "error",
    )  # fmt: skip
    return head + "\n\n" + markdown(columns, rows)


def _over(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


if __name__ == "__main__":
    sys.exit(main())
