"""The model's CPU step, whole and by part, on random weights of SmolLM2-135M's shape.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/cpu_ops.py --threads 1

Prints milliseconds, best of several: CPU time with one thread, which a busy neighbour hardly changes, else wall time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Callable

import torch

from transom_core.model_config.architecture import Architecture, LayerAttention
from transom_core.model_config.rope import Rope
from transom_kernels.paged_attention.batch import PagedBatch
from transom_worker.models.layers.forward_batch import ForwardBatch, LayerCache
from transom_worker.models.registry import build_model

BLOCK = 16
LAYER = LayerAttention(num_heads=9, num_kv_heads=3, head_size=64)
SMOLLM2 = Architecture(
    family="llama",
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    max_position=8192,
    rms_norm_eps=1e-5,
    ropes=(Rope(theta=100_000.0, head_size=64, size=64),) * 30,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    checkpoint_dtype="bfloat16",
    layers=(LAYER,) * 30,
)


def random_weights(name: str, *, shape: tuple[int, ...] | None = None, part: tuple[slice, ...] = ()) -> torch.Tensor:
    assert shape is not None, name
    return (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.04)[part]


def make_caches(dtype: torch.dtype, num_blocks: int, head_major: bool) -> tuple[LayerCache, ...]:
    kv_heads, size, layers = LAYER.num_kv_heads, LAYER.head_size, SMOLLM2.num_layers
    part = BLOCK * kv_heads * size
    stride = 2 * part * layers
    slab = torch.zeros(num_blocks * stride, dtype=dtype)
    token, head = (size, BLOCK * size) if head_major else (kv_heads * size, size)
    shape, strides = (num_blocks, BLOCK, kv_heads, size), (stride, token, head, 1)
    return tuple(
        LayerCache(
            k=slab.as_strided(shape, strides, 2 * i * part), v=slab.as_strided(shape, strides, (2 * i + 1) * part)
        )
        for i in range(layers)
    )


def make_batch(caches: tuple[LayerCache, ...], starts: list[int], counts: list[int]) -> Callable[[], ForwardBatch]:
    """A maker of batches whose scratch is empty, as each step's is."""
    free = list(range(caches[0].k.shape[0]))
    random.Random(0).shuffle(free)
    tables = [[free.pop() for _ in range(-(-(s + c) // BLOCK))] for s, c in zip(starts, counts, strict=True)]
    positions = [p for s, c in zip(starts, counts, strict=True) for p in range(s, s + c)]
    rows = [t for t, c in zip(tables, counts, strict=True) for _ in range(c)]
    slots = torch.tensor([t[p // BLOCK] * BLOCK + p % BLOCK for t, p in zip(rows, positions, strict=True)])
    zeros = [0] * len(starts)
    token_ids, offsets = torch.randint(0, SMOLLM2.vocab_size, (len(positions),)), torch.tensor(counts).cumsum(0)
    width = max(map(len, tables))

    def build() -> ForwardBatch:
        group = PagedBatch(
            block_size=BLOCK,
            num_sink_blocks=0,
            block_table=torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32),
            first_block=torch.tensor(zeros, dtype=torch.int32),
            attend_from=torch.tensor(zeros, dtype=torch.int32),
            slots=slots,
            query_offset=torch.tensor([0, *counts]).cumsum(0).int(),
            start=torch.tensor(starts, dtype=torch.int32),
            block_table_host=tables,
            first_block_host=zeros,
            attend_from_host=zeros,
            start_host=starts,
            count_host=counts,
        )
        return ForwardBatch(
            token_ids=token_ids,
            positions=torch.tensor(positions),
            groups=(group,),
            group_of_layer=(0,) * SMOLLM2.num_layers,
            caches=caches,
            logit_rows=offsets - 1,
        )

    return build


def best_ms(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        call()
        best = min(best, clock() - start)
    return best * 1e3


CASES = {
    "prefill 512": ([0], [512]),
    "prefill 512 after 512": ([512], [512]),
    "prefill 8 x 64": ([0] * 8, [64] * 8),
    "decode 1": ([512], [1]),
    "decode 8": ([505 + i for i in range(8)], [1] * 8),
    "decode 32": ([497 + i for i in range(32)], [1] * 32),
    "decode 32, 64 to 1056": ([64 + 32 * i for i in range(32)], [1] * 32),
    "decode 16 beside prefill 256": ([500] * 16 + [128], [1] * 16 + [256]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--token-major", action="store_true", help="blocks as [token, head, dim]")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    dtype = getattr(torch, arguments.dtype)
    model = build_model(SMOLLM2, random_weights, dtype=dtype, device="cpu", quantization=arguments.quantization)
    caches = make_caches(dtype, 1400, not arguments.token_major)
    for name, (starts, counts) in CASES.items():
        if arguments.only not in name:
            continue
        build = make_batch(caches, starts, counts)
        ms = best_ms(lambda build=build: model.forward(build()), arguments.repeats, clock)
        print(f"{name:32s} {ms:8.2f} ms  {sum(counts) / ms * 1e3:8.0f} tokens/s", flush=True)
        if arguments.profile:
            profile(lambda build=build: model.forward(build()))


def profile(call: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        call()
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=48))
    python = cProfile.Profile()
    python.runcall(call)
    pstats.Stats(python).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
