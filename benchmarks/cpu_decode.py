"""Decode and prefill speed of Transom's engine on CPUs, without HTTP; with `--compare`, of two variants in turns, as ratios.

    python benchmarks/cpu_decode.py
    python benchmarks/cpu_decode.py --compare reference
    python benchmarks/cpu_decode.py --compare GOMP_SPINCOUNT=2000 --batches 1,8 --contexts 16
    python benchmarks/cpu_decode.py --compare PYTHONPATH=OTHER/cluster:OTHER/worker:OTHER/kernels

`--compare` names the base: a value of TRANSOM_KERNELS, or environment variables as NAME=VALUE separated by commas. Each variant
has a child process with an engine of its own, and for each figure the two take turns, so that a machine whose speed moves slows
both. The ratio is the median of the rounds' ratios; above 1 the default is faster than the base.

A decode figure at context 512 and batch 8 begins when 8 sequences of 512 tokens have their first token. The first round computes
their prompts, later rounds find them in the prefix cache. Both variants get the same prompts: "same first tokens" says how many
greedy first tokens agree, which falls far below all where a kernel is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_engines.json_child import Child, ChildError

CHILD = Path(__file__).parent / "peer_engines" / "transom_child.py"
# PASSIVE makes torch's steps 2.5 times as long; give it back with --environment.
REMOVED_VARIABLES = ("OMP_WAIT_POLICY",)
DEFAULT = "default"


@dataclass(slots=True)
class Case:
    """One figure: prefill of `context` tokens (batch 0), or decode of `batch` sequences that start at `context` tokens."""

    batch: int
    context: int
    # By variant and round: of one step, or of the prompt.
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    outside_forward_ms: dict[str, list[float]] = field(default_factory=dict)
    first_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What the table calls it."""
        return f"decode, batch {self.batch} at {self.context}" if self.batch else f"prefill {self.context}"

    def median_ms(self, variant: str) -> float:
        """The median of all rounds."""
        return statistics.median(self.milliseconds[variant])

    def tokens_per_s(self, variant: str) -> float:
        """Tokens per second of the whole batch, or of the prompt."""
        return 1e3 * (self.batch or self.context) / self.median_ms(variant)

    def ratio(self, variant: str, base: str) -> float:
        """How many times as fast as the base `variant` is: the median of the rounds' ratios."""
        pairs = zip(self.milliseconds[base], self.milliseconds[variant], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    def same_first_tokens(self) -> str:
        """Of how many sequences all variants computed the same first token, as "31/32"; empty for prefill."""
        columns = list(zip(*self.first_tokens.values(), strict=True))
        return f"{sum(len(set(column)) == 1 for column in columns)}/{len(columns)}" if columns else ""

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "label": self.label,
            "batch": self.batch,
            "context": self.context,
            "tokens_per_s": {variant: self.tokens_per_s(variant) for variant in self.milliseconds},
            "milliseconds": self.milliseconds,
            "outside_forward_ms": self.outside_forward_ms,
            "same_first_tokens": self.same_first_tokens(),
        }


def measure_round(case: Case, variant: str, child: Child, steps: int) -> None:
    """Take one figure of one variant."""
    if not case.batch:
        milliseconds = 1e3 * child.call("prefill", num_tokens=case.context)["seconds"]
    else:
        case.first_tokens[variant] = child.call("start", batch=case.batch, context=case.context)["first_tokens"]
        figures = child.call("decode", steps=steps)
        milliseconds = 1e3 * figures["seconds"] / steps
        case.outside_forward_ms.setdefault(variant, []).append(1e3 * figures["outside_forward_s"] / steps)
    case.milliseconds.setdefault(variant, []).append(milliseconds)


def base_environment(compare: str) -> dict[str, str]:
    """The variables that `--compare` names."""
    if "=" not in compare:
        return {"TRANSOM_KERNELS": compare}
    return read_variables(compare.split(","))


def read_variables(assignments: list[str]) -> dict[str, str]:
    """Variables from NAME=VALUE texts. Raises ValueError."""
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not (name and equals):
            raise ValueError(f"{assignment!r} is not NAME=VALUE.")
        found[name] = value
    return found


def describe(case: Case, base: str | None) -> str:
    """One line of the table."""
    line = f"{case.label:<28}"
    for variant in case.milliseconds:
        line += f"  {variant} {case.tokens_per_s(variant):8,.1f} tok/s {case.median_ms(variant):8.2f} ms"
    if case.outside_forward_ms:
        line += f" ({statistics.median(case.outside_forward_ms[DEFAULT]):.2f} outside forward)"
    if base is not None:
        line += f"  ratio {case.ratio(DEFAULT, base):.2f}  same first tokens {case.same_first_tokens() or '-'}"
    return line


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line a figure, and write JSON if asked."""
    options = parse(arguments)
    environment = {k: v for k, v in os.environ.items() if k not in REMOVED_VARIABLES}
    environment |= read_variables(options.environment)
    variants = {DEFAULT: environment}
    base = options.compare
    if base is not None:
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
    cases = [Case(0, options.prompt_tokens)] if options.prompt_tokens else []
    cases += [Case(batch, context) for context in options.contexts for batch in sorted(options.batches)]
    children: dict[str, Child] = {}
    try:
        for variant, variables in variants.items():
            children[variant] = Child(variant, [sys.executable, str(CHILD)], variables)
        for variant, child in children.items():
            print(f"{variant}: engine ready in {child.call('load', settings=settings)['seconds']:.1f} s", flush=True)
            child.call("start", batch=2, context=16)
            child.call("decode", steps=4)
        for case in cases:
            for number in range(options.rounds):
                order = list(children.items())
                for variant, child in order if number % 2 == 0 else reversed(order):
                    measure_round(case, variant, child, options.steps)
            print(describe(case, base), flush=True)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        for child in children.values():
            child.stop()
    if options.json:
        figures = {"settings": settings, "compare": base, "cases": [case.as_json() for case in cases]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


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
