"""The small operators of a decoder layer on CPUs: torch's time over the kernel's, both called in turns in one process.

    python benchmarks/cpu_small_operators.py --rows 1 8 32 512 --shape smollm2

A ratio above 1 means that the kernel is faster. Both are called from Python, so at few rows the ratio is that of the calls; in
recorded programs a kernel's call costs less still.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from transom_kernels.block_copy import block_copy
from transom_kernels.cpu.threads import set_num_threads
from transom_kernels.gated_mlp import gated_activation
from transom_kernels.kv_write import Preparation, kv_write, prepare_qkv
from transom_kernels.launch import prefer
from transom_kernels.layer_norm import layer_norm
from transom_kernels.rms_norm import head_norm_, rms_norm
from transom_kernels.rotary import rotary_, rotary_tables

EPS = 1e-5
BLOCK = 16
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's layer."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int


SHAPES = {
    "smollm2": Shape(hidden=576, inner=1536, heads=9, kv_heads=3, head=64),
    "llama-8b": Shape(hidden=4096, inner=14336, heads=32, kv_heads=8, head=128),
}


def cases(shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, tuple[Call, Call]]:
    """By operator: what torch computes, and the same with kernels."""

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes).to(dtype)

    def same(call: Call) -> tuple[Call, Call]:
        def by_torch() -> None:
            with prefer("reference"):
                call()

        return by_torch, call

    x, residual, weight = random(rows, shape.hidden), random(rows, shape.hidden), random(shape.hidden)
    gate_up = random(rows, 2 * shape.inner)
    heads = shape.heads + 2 * shape.kv_heads
    qkv = random(rows, heads, shape.head)
    qk, v = qkv.split_with_sizes((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
    q, k = qk.split_with_sizes((shape.heads, shape.kv_heads), dim=1)
    slab = torch.zeros(2, rows // BLOCK + 2, BLOCK, shape.kv_heads, shape.head, dtype=dtype)
    positions, slots = torch.arange(rows) + 100, torch.randperm(rows)
    half = torch.ones(shape.head // 2)
    frequency, sign = torch.rand(shape.head // 2).repeat(2), torch.cat([-half, half])
    cos, sin = rotary_tables(positions, frequency, sign, dtype)
    head_weight = torch.ones(shape.heads + shape.kv_heads, shape.head).to(dtype)  # in place, again and again
    how = Preparation(norm=True, q_weight=head_weight[: shape.heads], k_weight=head_weight[shape.heads :])
    blocks = torch.zeros(64, 2 * 30 * BLOCK * shape.kv_heads * shape.head * 2, dtype=torch.uint8)
    pairs = [(index, index + 32) for index in range(min(rows, 32))]

    def steps_by_torch(norm: bool) -> None:
        with prefer("reference"):
            if norm:
                head_norm_(qk, head_weight, EPS)
            rotary_(qk, cos, sin)
            kv_write(k, v, slab[0], slab[1], slots)

    return {
        "rms_norm": same(lambda: rms_norm(x, weight, EPS)),
        "rms_norm of a sum": same(lambda: rms_norm(x, weight, EPS, residual)),
        "layer_norm": same(lambda: layer_norm(x, weight, EPS)),
        "head_norm_": same(lambda: head_norm_(qk, head_weight, EPS)),
        "rotary_tables": same(lambda: rotary_tables(positions, frequency, sign, dtype)),
        "rotary_": same(lambda: rotary_(qk, cos, sin)),
        "prepare_qkv": (
            lambda: steps_by_torch(False),
            lambda: prepare_qkv(q, k, v, slab[0], slab[1], slots, (cos, sin)),
        ),
        "prepare_qkv with norms": (
            lambda: steps_by_torch(True),
            lambda: prepare_qkv(q, k, v, slab[0], slab[1], slots, (cos, sin), how),
        ),
        "kv_write": same(lambda: kv_write(k, v, slab[0], slab[1], slots)),
        "gated silu": same(lambda: gated_activation(gate_up, "silu")),
        "gated gelu": same(lambda: gated_activation(gate_up, "gelu_tanh")),
        "block_copy": same(lambda: block_copy(blocks, pairs)),
    }


def medians_us(first: Call, second: Call, repeats: int) -> tuple[float, float]:
    """The median times of two functions, called in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for call in (first, second) * 3:
        call()
    for _ in range(repeats):
        for call, own in zip((first, second), times, strict=True):
            begin = time.perf_counter()
            call()
            own.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    set_num_threads(arguments.threads)
    print(f"{'operator':24s}" + "".join(f"{rows:>22d} rows" for rows in arguments.rows))
    table = [cases(SHAPES[arguments.shape], rows, getattr(torch, arguments.dtype)) for rows in arguments.rows]
    for name in table[0]:
        if arguments.only not in name:
            continue
        print(f"{name:24s}", end="")
        for column in table:
            by_torch, by_kernel = medians_us(*column[name], arguments.repeats)
            print(f"{by_torch:9.1f} {by_kernel:8.1f} us {by_torch / by_kernel:5.1f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
