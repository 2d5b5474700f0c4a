"""Random paged batches: dense keys and values per sequence, scattered into a cache that is NaN everywhere else."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from transom_kernels.paged_attention.inputs import PagedBatch, PagedInputs
from transom_kernels.paged_attention.rule import MaskRule

MASK_OPTIONS = ("window", "num_sink_tokens", "chunk")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(kw_only=True)
class Sequence:
    """`count` queries at positions from `start`."""

    start: int
    count: int
    attend_from: int = 0
    first_key: int | None = None  # keys below are absent from the run (the window slid on); default: all are there


@dataclass(kw_only=True)
class Shape:
    heads: int = 6
    kv_heads: int = 2
    size: int = 24
    v_size: int | None = None
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    head_major: bool = True
    num_sink_blocks: int = 0


@dataclass(kw_only=True)
class Case:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: PagedBatch
    keys: list[torch.Tensor] = field(default_factory=list)  # of each sequence, float32 [start + count, KVH, D]
    values: list[torch.Tensor] = field(default_factory=list)

    def inputs(self, *, scale: float = 0.3, **options: Any) -> PagedInputs:
        """What implementations are given; `options` are those of `paged_attention`, and caches instead of the case's."""
        rule = MaskRule(**{name: options.pop(name) for name in MASK_OPTIONS if name in options})
        caches = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        return PagedInputs(q=self.q, batch=self.batch, scale=scale, rule=rule, **{**caches, **options})


def empty_caches(shape: Shape, ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN-filled K and V views of one slab, as the layout makes them: a gap, K, V, a gap, in every block."""
    v_size = shape.v_size or shape.size
    per_head = shape.block_size * shape.kv_heads
    k_len, v_len, gap = per_head * shape.size, per_head * v_size, 16
    stride = gap + k_len + v_len + gap
    slab = torch.full((ids * stride,), float("nan"), dtype=shape.dtype)

    def view(offset: int, size: int) -> torch.Tensor:
        token, head = (size, shape.block_size * size) if shape.head_major else (shape.kv_heads * size, size)
        return slab.as_strided((ids, shape.block_size, shape.kv_heads, size), (stride, token, head, 1), offset)

    return view(gap, shape.size), view(gap + k_len, v_size)


def make_case(sequences: list[Sequence], shape: Shape, seed: int = 0) -> Case:
    """Scatter random keys and values over shuffled blocks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(shape.dtype)

    size, num_sink_blocks = shape.block_size, shape.num_sink_blocks
    total = sum(-(-(s.start + s.count) // size) for s in sequences)
    free = list(range(total + 3))
    rng.shuffle(free)
    k_cache, v_cache = empty_caches(shape, total + 3)
    tables, firsts, slots, keys, values = [], [], [], [], []
    for s in sequences:
        end = s.start + s.count
        k, v = normal(end, shape.kv_heads, shape.size), normal(end, shape.kv_heads, shape.v_size or shape.size)
        low = s.first_key or 0
        first = max(low // size, num_sink_blocks)
        blocks = {block: free.pop() for block in range(-(-end // size)) if block < num_sink_blocks or block >= first}
        kept = [p for p in range(end) if p // size in blocks and (p >= low or p < num_sink_blocks * size)]
        at = (
            torch.tensor([blocks[p // size] for p in kept], dtype=torch.long),
            torch.tensor(kept, dtype=torch.long) % size,
        )
        k_cache[at], v_cache[at] = k[kept], v[kept]
        tables.append([blocks[block] for block in sorted(blocks)])
        firsts.append(first)
        slots.extend(blocks[p // size] * size + p % size for p in range(s.start, end))
        keys.append(k.float())
        values.append(v.float())
    width = max(map(len, tables))
    counts = [s.count for s in sequences]
    batch = PagedBatch(
        block_size=size,
        num_sink_blocks=num_sink_blocks,
        block_table=torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32),
        first_block=torch.tensor(firsts, dtype=torch.int32),
        attend_from=torch.tensor([s.attend_from for s in sequences], dtype=torch.int32),
        slots=torch.tensor(slots),
        query_offset=torch.tensor([0, *counts]).cumsum(0).int(),
        start=torch.tensor([s.start for s in sequences], dtype=torch.int32),
        block_table_host=tables,
        first_block_host=firsts,
        attend_from_host=[s.attend_from for s in sequences],
        start_host=[s.start for s in sequences],
        count_host=counts,
    )
    q = normal(sum(counts), shape.heads, shape.size)
    return Case(q=q, k_cache=k_cache, v_cache=v_cache, batch=batch, keys=keys, values=values)
