"""Attention on CPUs: the compiled kernel against torch, in turns in one process, over caches that memory has to deliver anew.

    python benchmarks/cpu_attention.py --threads 2

Prints microseconds of one layer (lower quartiles), and how many times as fast the kernel is. The default shape is SmolLM2-135M's.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tests.kernels.paged_case import Case, Sequence, Shape, make_case

from transom_kernels.cpu.threads import set_num_threads
from transom_kernels.launch import Kernels, prefer
from transom_kernels.paged_attention import paged_attention

LAYERS_BYTES = (
    200_000_000  # so many bytes of caches are visited in turn, so that no layer is left in the processor's caches
)

CASES = {
    **{
        f"decode {batch} at {context}": [Sequence(start=context - 1 - b, count=1) for b in range(batch)]
        for batch in (1, 8, 32)
        for context in (128, 512, 2048)
    },
    "prompt 512": [Sequence(start=0, count=512)],
    "prompt 2048": [Sequence(start=0, count=2048)],
    "prompt 512 after 1024": [Sequence(start=1024, count=512)],
    "decode 16 at 512 beside prompt 256": [Sequence(start=511, count=1)] * 16 + [Sequence(start=0, count=256)],
}


def microseconds(layers: list[Case], kernels: Kernels) -> float:
    """One layer's time, on average over the layers."""
    with prefer(kernels):
        begin = time.perf_counter()
        for layer in layers:
            paged_attention(layer.q, layer.k_cache, layer.v_cache, layer.batch, scale=0.125)
        return (time.perf_counter() - begin) / len(layers) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    set_num_threads(arguments.threads)
    shape = Shape(
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        size=arguments.head_size,
        block_size=16,
        dtype=getattr(torch, arguments.dtype),
    )
    for name, sequences in CASES.items():
        if arguments.only not in name:
            continue
        first = make_case(sequences, shape)
        num_layers = max(1, min(30, LAYERS_BYTES // (2 * first.k_cache.untyped_storage().nbytes())))
        layers = [first, *(make_case(sequences, shape, seed) for seed in range(1, num_layers))]
        times: dict[Kernels, list[float]] = {"reference": [], "auto": []}
        for _ in range(arguments.turns + 1):
            for kernels, found in times.items():
                found.append(microseconds(layers, kernels))
        torch_us, kernel_us = (statistics.quantiles(found[1:], n=4)[0] for found in times.values())
        print(
            f"{name:36s} torch {torch_us:9.0f}  kernel {kernel_us:9.0f}  {torch_us / kernel_us:5.2f} times", flush=True
        )


if __name__ == "__main__":
    main()
