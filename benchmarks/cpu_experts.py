"""Experts and their router on CPUs: the kernels against torch, and against reading the same memory.

    python benchmarks/cpu_experts.py --threads 1
    python benchmarks/cpu_experts.py --threads 1 --only gpt-oss --tokens 1,64

The candidates take turns for several rounds in one process, each round with other experts; a figure is the median of its rounds,
and the ratio that of medians. With `--threads 1` times are CPU time, which busy neighbours hardly change. `read` is the time that
a sum takes over as much memory as the weights of the chosen experts have.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from transom_kernels.cpu.threads import set_num_threads
from transom_kernels.launch import prefer
from transom_kernels.moe import ExpertTensors, GateRule, MxTensor
from transom_kernels.route import Routing
from transom_worker.models.layers.expert_router import ExpertRouter, Routes
from transom_worker.models.layers.experts import make_experts


@dataclass(frozen=True, slots=True)
class Case:
    """One layer's experts; a model's number of experts may be cut to what fits into memory."""

    num_experts: int
    num_chosen: int
    inner: int
    width: int
    packed: bool = False  # MXFP4


CASES = {
    "qwen3-30b": Case(num_experts=32, num_chosen=8, inner=768, width=2048),
    "mixtral (half as wide)": Case(num_experts=8, num_chosen=2, inner=7168, width=2048),
    "gpt-oss-20b": Case(num_experts=32, num_chosen=4, inner=2880, width=2880, packed=True),
}


def tensors_of(case: Case) -> tuple[ExpertTensors, ExpertTensors]:
    """Weights for the kernels, and the same in bfloat16."""
    shapes = ((case.num_experts, 2 * case.inner, case.width), (case.num_experts, case.width, case.inner))
    if not case.packed:
        gate_up, down = ((torch.randn(shape) / 32).bfloat16() for shape in shapes)
        plain = ExpertTensors(gate_up=gate_up, down=down)
        return plain, plain
    mx = [
        MxTensor(
            blocks=torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8),
            scales=torch.randint(118, 122, (experts, rows, columns // 32), dtype=torch.uint8),
        )
        for experts, rows, columns in shapes
    ]
    wide = [tensor.dequantised().bfloat16() for tensor in mx]
    return ExpertTensors(gate_up=mx[0], down=mx[1]), ExpertTensors(gate_up=wide[0], down=wide[1])


def measure(case: Case, tokens: int, rounds: int, clock: Callable[[], float]) -> str:
    """One line of the table."""
    given, plain = tensors_of(case)
    rule, routing = GateRule(), Routing(num_chosen=case.num_chosen)
    router_weight = torch.randn(case.num_experts, case.width) * case.width**-0.5
    own, own_router = make_experts(given, rule, quantization="none"), ExpertRouter(router_weight, routing)
    with prefer("reference"):
        torchs, torch_router = make_experts(plain, rule, quantization="none"), ExpertRouter(router_weight, routing)
    expert_bytes = own.weight_bytes // case.num_experts
    times: dict[str, list[float]] = {name: [] for name in ("own", "torch", "read", "own route", "torch route")}

    def timed(name: str, call: Callable[[], object]) -> None:
        begin = clock()
        call()
        times[name].append(clock() - begin)

    for _ in range(rounds + 1):
        x = torch.randn(tokens, case.width).bfloat16()
        timed("own route", lambda x=x: own_router(x))
        routes: Routes = own_router(x)
        timed("own", lambda x=x, routes=routes: own(x, routes))
        with prefer("reference"):
            timed("torch route", lambda x=x: torch_router(x))
            timed("torch", lambda x=x, routes=routes: torchs(x, routes))
        memory = torch.ones(len(routes.experts_TK.unique()) * expert_bytes // 8, dtype=torch.int64)
        timed("read", memory.sum)
    median = {name: statistics.median(each[1:]) * 1e3 for name, each in times.items()}
    return (
        f"{tokens:6d} {median['own']:9.2f} {median['torch']:9.2f} {median['read']:9.2f} "
        f"{median['torch'] / median['own']:9.2f}x {median['own route']:9.3f} {median['torch route']:9.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--tokens", default="1,8,32,256")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    set_num_threads(arguments.threads)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    for name, case in CASES.items():
        if arguments.only in name:
            print(
                f"{name}, milliseconds\ntokens       own     torch      read   own is  own route torch route",
                flush=True,
            )
            for tokens in (int(text) for text in arguments.tokens.split(",")):
                print(measure(case, tokens, arguments.rounds, clock), flush=True)


if __name__ == "__main__":
    main()
