"""Paged batches of any size, made on the device: random keys and values, blocks in random order.

Legend: B sequences, T query tokens, H query heads, KVH KV heads, D key width, E value width, P block size, L keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from transom_kernels.paged_attention.batch import PagedBatch
from transom_kernels.quantised_kv import KvFormat
from transom_kernels.quantised_kv.reference import dequantise_rows, quantise_rows

BLOCK = 16  # tokens of a cache block, as served by default
SPARE_BYTES = (
    8 << 30
)  # for partial results, references in float64 and rivals' copies, none of which is of the largest slabs


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A layer's heads. Inside a block a head's tokens lie together, as in the worker's slab."""

    query: int
    kv: int
    size: int

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Of keys and values."""
        return 2 * self.kv * self.size * itemsize


@dataclass(slots=True, kw_only=True)
class Paged:
    """Queries, caches and their batch; `scales` of quantised keys and values."""

    q: torch.Tensor  # [T, H, D]
    k_cache: torch.Tensor  # [ids, P, KVH, D]
    v_cache: torch.Tensor
    batch: PagedBatch
    scales: tuple[torch.Tensor, torch.Tensor] | None = None  # [ids, P, KVH] float32 each


def make_paged(
    heads: Heads, starts: list[int], counts: list[int], device: torch.device, *, window: int | None = None
) -> Paged:
    """Sequences with `starts[b]` tokens in the cache and `counts[b]` new ones; with a window only its blocks are kept."""
    firsts = [0 if window is None else max(0, start - window + 1) // BLOCK for start in starts]
    lengths = [-(-(start + count) // BLOCK) - first for start, count, first in zip(starts, counts, firsts, strict=True)]
    k_cache, v_cache = random_caches(heads, sum(lengths), device)
    order = torch.randperm(len(k_cache), generator=torch.Generator().manual_seed(1))[: sum(lengths)].tolist()
    tables, used = [], 0
    for length in lengths:
        tables.append(order[used : used + length])
        used += length
    batch = _batch(tables, firsts, starts, counts, device)
    q = torch.randn(sum(counts), heads.query, heads.size, device=device).to(k_cache.dtype)
    return Paged(q=q, k_cache=k_cache, v_cache=v_cache, batch=batch)


def quantise(paged: Paged, kv_format: KvFormat) -> Paged:
    """The same batch over quantised caches, in which a head's tokens lie together, too."""
    k, v = (quantised(cache, kv_format) for cache in (paged.k_cache, paged.v_cache))
    return replace(paged, k_cache=k[0], v_cache=v[0], scales=(k[1], v[1]))


def one_sequence(paged: Paged, b: int) -> Paged:
    """A sequence as if it were alone, over the same cache."""
    batch = paged.batch
    row = sum(batch.count_host[:b])
    alone = _batch(
        [batch.block_table_host[b]],
        [batch.first_block_host[b]],
        [batch.start_host[b]],
        [batch.count_host[b]],
        paged.q.device,
    )
    return replace(paged, q=paged.q[row : row + batch.count_host[b]], batch=alone)


def expected_rows(
    paged: Paged, rows: list[int], *, window: int | None, sink_logits: torch.Tensor | None
) -> torch.Tensor:
    """Attention of some query rows in float64, keys gathered densely: [rows, H, E]."""
    return torch.stack([_expected_row(paged, row, window, sink_logits) for row in rows])


def some_rows(paged: Paged, most: int = 12) -> list[int]:
    """Query rows worth comparing: the first and last of some sequences, and of a prompt some between."""
    counts = paged.batch.count_host
    ends, row = [], 0
    for count in counts:
        ends += [row, row + count // 3, row + count - 1]
        row += count
    rows = sorted(set(ends))
    return rows if len(rows) <= most else sorted({rows[i * (len(rows) - 1) // (most - 1)] for i in range(most)})


def poison_tails(paged: Paged) -> Callable[[], None]:
    """Fill the slots behind each sequence's last key with NaN, their scales in quantised caches; returns what undoes that."""
    batch, kept = paged.batch, []
    poisoned = paged.scales or (paged.k_cache, paged.v_cache)
    for b, (start, count) in enumerate(zip(batch.start_host, batch.count_host, strict=True)):
        block, offset = batch.block_table_host[b][-1], (start + count) % BLOCK
        if offset:
            kept += [(cache[block, offset:], cache[block, offset:].clone()) for cache in poisoned]
    for place, _ in kept:
        place.fill_(float("nan"))

    def restore() -> None:
        for place, numbers in kept:
            place.copy_(numbers)

    return restore


def dense(paged: Paged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous queries [B, H, R, D], keys and values [B, KVH, L, D], for those who know no pages; all lengths are equal."""
    batch = paged.batch
    length, count = batch.start_host[0] + batch.count_host[0], batch.count_host[0]
    table = batch.block_table.long()
    q = paged.q.view(len(table), count, *paged.q.shape[1:]).transpose(1, 2).contiguous()
    k, v = (
        cache[table].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for cache in (paged.k_cache, paged.v_cache)
    )
    return q, k, v


def _expected_row(paged: Paged, row: int, window: int | None, sink_logits: torch.Tensor | None) -> torch.Tensor:
    batch, b, before = paged.batch, 0, 0
    while row >= before + batch.count_host[b]:
        before += batch.count_host[b]
        b += 1
    position = batch.start_host[b] + row - before
    low = 0 if window is None else max(0, position - window + 1)
    keys = torch.arange(low, position + 1, device=paged.q.device)
    table = torch.tensor(batch.block_table_host[b], device=paged.q.device)
    blocks = table[keys // BLOCK - batch.first_block_host[b]]
    caches, scales = (paged.k_cache, paged.v_cache), paged.scales or (None, None)
    k, v = (cached_rows(cache, scale, blocks, keys % BLOCK) for cache, scale in zip(caches, scales, strict=True))
    group = paged.q.shape[1] // k.shape[1]
    q = paged.q[row].double().view(k.shape[1], group, -1)
    scores = torch.einsum("kgd,lkd->kgl", q, k) * paged.q.shape[2] ** -0.5
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.double().view(-1, group, 1)], dim=2)
    weights = scores.softmax(2)[..., : len(keys)]
    return torch.einsum("kgl,lkd->kgd", weights, v).flatten(0, 1)


def cached_rows(
    cache: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Keys or values at places of a cache, in float64."""
    elements = cache[blocks, offsets]
    return (elements if scale is None else dequantise_rows(elements, scale[blocks, offsets])).double()


def quantised(cache: torch.Tensor, kv_format: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache in a format, and its scales."""
    ids, tokens, kv_heads, size = cache.shape
    shape = (ids, kv_heads, tokens, size // kv_format.numbers_per_element)
    elements = torch.empty(shape, dtype=kv_format.dtype, device=cache.device).transpose(1, 2)
    scales = torch.empty(shape[:3], dtype=torch.float32, device=cache.device).transpose(1, 2)
    for begin in range(0, ids, 4096):  # all at once would take four times the cache's memory
        some = slice(begin, begin + 4096)
        elements[some], scales[some] = quantise_rows(cache[some], kv_format)
    return elements, scales


def _slab(elements: int, device: torch.device) -> torch.Tensor:
    """Random numbers.

    Raises:
        MemoryError: the device has no room for it and for what a case needs besides.
    """
    if device.type == "cuda":
        wanted, free = 2 * elements + SPARE_BYTES, torch.cuda.mem_get_info()[0]
        if wanted > free:
            raise MemoryError(f"needs {wanted / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")
    slab = torch.empty(elements, dtype=torch.bfloat16, device=device)
    for part in slab.split(1 << 30):
        part.normal_()
    return slab


def random_caches(heads: Heads, num_blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches of random keys and values.

    Raises:
        MemoryError: see `_slab`.
    """
    part = BLOCK * heads.kv * heads.size
    slab = _slab(num_blocks * 2 * part, device)
    shape, strides = (num_blocks, BLOCK, heads.kv, heads.size), (2 * part, heads.size, BLOCK * heads.size, 1)
    return slab.as_strided(shape, strides, 0), slab.as_strided(shape, strides, part)


def _batch(
    tables: list[list[int]], firsts: list[int], starts: list[int], counts: list[int], device: torch.device
) -> PagedBatch:
    def on_device(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    width = max(map(len, tables))
    slots = [
        table[p // BLOCK - first] * BLOCK + p % BLOCK
        for table, first, start, count in zip(tables, firsts, starts, counts, strict=True)
        for p in range(start, start + count)
    ]
    return PagedBatch(
        block_size=BLOCK,
        num_sink_blocks=0,
        block_table=torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32, device=device),
        first_block=on_device(firsts),
        attend_from=on_device([0] * len(tables)),
        slots=on_device(slots, torch.int64),
        query_offset=on_device([0, *counts]).cumsum(0).int(),
        start=on_device(starts),
        block_table_host=tables,
        first_block_host=firsts,
        attend_from_host=[0] * len(tables),
        start_host=starts,
        count_host=counts,
    )
