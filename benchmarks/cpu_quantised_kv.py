"""Decoding over quantised KV caches on CPUs: the compiled kernel over each format against bfloat16, in turns in one process, over
caches that memory has to deliver anew.

    python benchmarks/cpu_quantised_kv.py --threads 2

Prints, for each context, the bytes of a token and layer, microseconds of one layer (lower quartiles of the processor's time, which
neighbours disturb less than the clock), GB/s that were read, and how many times as fast as bfloat16. The default shape is
SmolLM2-135M's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from tests.kernels.paged_case import Case, Sequence, Shape, make_case

from transom_kernels.cpu.threads import set_num_threads
from transom_kernels.paged_attention import paged_attention
from transom_kernels.quantised_kv import FORMATS, quantise_rows

LAYERS_BYTES = (
    200_000_000  # bfloat16 caches that are visited in turn, so that no layer is left in the processor's caches
)
BLOCK_SIZE = 16
BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Layer:
    """One layer's caches."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the caches and their scales."""
        parts = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(part.nbytes for part in parts if part is not None)


def rows_of(shape: Shape, num_blocks: int, seed: int) -> torch.Tensor:
    """Random rows [blocks, P, KVH, D] whose tokens are adjacent, as in a worker's blocks."""
    generator = torch.Generator().manual_seed(seed)
    size = (num_blocks, shape.kv_heads, BLOCK_SIZE, shape.size)
    return torch.randn(size, generator=generator, dtype=torch.float32).bfloat16().transpose(1, 2)


def layer_of(name: str, k: torch.Tensor, v: torch.Tensor) -> Layer:
    """Keys and values in a format; each layer has memory of its own."""
    if name == BFLOAT16:
        return Layer(k.clone(), v.clone(), None, None)
    kv_format = next(kv_format for kv_format in FORMATS.values() if kv_format.name == name)
    (k, k_scale), (v, v_scale) = (quantise_rows(rows.transpose(1, 2).contiguous(), kv_format) for rows in (k, v))
    return Layer(k.transpose(1, 2), v.transpose(1, 2), k_scale.transpose(1, 2), v_scale.transpose(1, 2))


def microseconds(case: Case, layers: list[Layer], clock: str) -> float:
    """One layer's time, on average over the layers."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    begin = now()
    for layer in layers:
        paged_attention(case.q, layer.k, layer.v, case.batch, scale=0.125, k_scale=layer.k_scale, v_scale=layer.v_scale)
    return (now() - begin) / len(layers) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--formats", default="fp8,int8,int4")
    parser.add_argument("--contexts", default="1024,8192,32768")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    set_num_threads(arguments.threads)
    shape = Shape(
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        size=arguments.head_size,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    names = [BFLOAT16, *arguments.formats.split(",")]
    for context in map(int, arguments.contexts.split(",")):
        case = make_case([Sequence(start=context - 1, count=1)], shape)
        num_blocks, bf16_bytes = case.k_cache.shape[0], 4 * context * shape.kv_heads * shape.size
        num_layers = max(2, min(60, LAYERS_BYTES // bf16_bytes))
        layers: dict[str, list[Layer]] = {name: [] for name in names}
        for seed in range(num_layers):
            k, v = rows_of(shape, num_blocks, 2 * seed), rows_of(shape, num_blocks, 2 * seed + 1)
            for name in names:
                layers[name].append(layer_of(name, k, v))
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.turns + 1):
            for name, found in times.items():
                found.append(microseconds(case, layers[name], arguments.clock))
        for name in names:
            took_us, bf16_us = (statistics.quantiles(times[of][1:], n=4)[0] for of in (name, BFLOAT16))
            per_token = layers[name][0].num_bytes // (num_blocks * BLOCK_SIZE)
            print(
                f"context {context:6d}  {name:9s} {per_token:4d} bytes a token  {took_us:8.0f} us  "
                f"{per_token * context / took_us / 1e3:6.1f} GB/s  {bf16_us / took_us:5.2f} times bfloat16's speed",
                flush=True,
            )


if __name__ == "__main__":
    main()
