"""Decode and prefill speed of Transom's engine on CPUs, without HTTP; with `--compare`, of two variants in turns, as ratios.

    python -m benchmarks.engine.cpu_decode
    python -m benchmarks.engine.cpu_decode --compare reference
    python -m benchmarks.engine.cpu_decode --compare GOMP_SPINCOUNT=2000 --batches 1,8 --contexts 16
    python -m benchmarks.engine.cpu_decode --compare PYTHONPATH=OTHER/cluster:OTHER/worker:OTHER/kernels

`--compare` names the base: a value of TRANSOM_KERNELS, or environment variables as NAME=VALUE separated by commas. Each variant
has a child process with an engine of its own, and for each figure the two take turns, so that a machine whose speed moves slows
both. The ratio is the median of the rounds' ratios; above 1 the default is faster than the base.

A decode figure at context 512 and batch 8 begins when 8 sequences of 512 tokens have their first token. The first round computes
their prompts, later rounds find them in the prefix cache. Both variants get the same prompts: "same first tokens" says how many
greedy first tokens agree, which falls far below all where a kernel is wrong.

It compares two states of the code while one works on it; docs/performance.md has the figures of `cpu_peers` instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.engine.peers.figures import Figures
from benchmarks.json_child import Child, ChildError

CHILD = "benchmarks.engine.peers.transom_peer"
# PASSIVE makes torch's steps 2.5 times as long; give it back with --environment.
REMOVED_VARIABLES = ("OMP_WAIT_POLICY",)
DEFAULT = "default"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and write JSON if asked."""
    options = parse(arguments)
    environment = {k: v for k, v in os.environ.items() if k not in REMOVED_VARIABLES}
    environment |= read_variables(options.environment)
    variants, base = {DEFAULT: environment}, options.compare or DEFAULT
    if options.compare is not None:
        variants = {base: environment | base_environment(base)} | variants
    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "device": "cpu",
        "kv_cache_memory_bytes": options.kv_cache_memory,
        "max_num_seqs": max(64, *options.batches),
        "num_threads": options.threads,
    }
    figures, children = Figures(), dict[str, Child]()
    try:
        for variant, variables in variants.items():
            children[variant] = Child(variant, sys.executable, CHILD, variables)
            seconds = children[variant].call("load", settings=settings)["seconds"]
            print(f"{variant}: engine ready in {seconds:.1f} s", flush=True)
            children[variant].call("start", batch=2, context=16)
            children[variant].call("decode", steps=4)
        if options.prompt_tokens:
            measure_prefill(figures, children, options.prompt_tokens, options.rounds)
        for context in options.contexts:
            for batch in sorted(options.batches):
                measure_decode(figures, children, batch, context, options)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        for child in children.values():
            child.stop()
    print("\n".join(figures.table(list(variants), base)))
    if options.json:
        written = {"settings": settings, "compare": options.compare, "figures": figures.as_json(base)}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def measure_prefill(figures: Figures, children: dict[str, Child], num_tokens: int, rounds: int) -> None:
    """The speed of one new prompt, in turns."""
    row = figures.row(f"prefill {num_tokens}", "tokens/s")
    for number in range(rounds):
        for variant, child in in_turn(children, number):
            row.add(variant, number, num_tokens / child.call("prefill", num_tokens=num_tokens)["seconds"])


def measure_decode(
    figures: Figures, children: dict[str, Child], batch: int, context: int, options: argparse.Namespace
) -> None:
    """The speed of a batch that starts at a context, in turns; its time outside of forward passes; whether first tokens agree."""
    label = f"decode, batch {batch} at {context}"
    row = figures.row(label, "tokens/s")
    outside = figures.row(f"{label}, outside forward", "ms a step", higher_is_better=False, decimals=2)
    first_tokens: dict[str, list[int]] = {}
    for number in range(options.rounds):
        for variant, child in in_turn(children, number):
            first_tokens[variant] = child.call("start", batch=batch, context=context)["first_tokens"]
            found = child.call("decode", steps=options.steps)
            row.add(variant, number, batch * options.steps / found["seconds"])
            outside.add(variant, number, 1e3 * found["outside_forward_s"] / options.steps)
    columns = list(zip(*first_tokens.values(), strict=True))
    same = sum(len(set(column)) == 1 for column in columns)
    print(f"{label}: same first tokens {same}/{len(columns)}", flush=True)


def in_turn(children: dict[str, Child], number: int) -> list[tuple[str, Child]]:
    """The variants in the order of a round: each begins every other one."""
    order = list(children.items())
    return order if number % 2 == 0 else order[::-1]


def base_environment(compare: str) -> dict[str, str]:
    """The variables that `--compare` names."""
    return read_variables(compare.split(",")) if "=" in compare else {"TRANSOM_KERNELS": compare}


def read_variables(assignments: list[str]) -> dict[str, str]:
    """Variables from NAME=VALUE texts. Raises ValueError."""
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name and equals):
            raise ValueError(f"{assignment!r} is not NAME=VALUE.")
        found[name] = value
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--compare", metavar="BASE")
    parser.add_argument("--environment", metavar="NAME=VALUE", action="append", default=[], help="for both variants")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--contexts", type=numbers, default=[16, 512, 2048])
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the prefill figure; 0: none")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="CPU threads of the engine; all cores if unset")
    parser.add_argument("--kv-cache-memory", default="2GiB", help="of each variant; 32 sequences of 2,048 need 1.7 GB")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
