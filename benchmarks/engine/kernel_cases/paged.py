"""Paged batches of any size, made on the device: random keys and values, blocks in random order, NaN where nothing may be read.

Legend: B sequences, T query tokens, H query heads, KVH KV heads, D head width, P block size, L keys.
"""

from dataclasses import dataclass, replace

import torch

from benchmarks.engine.kernel_cases.case import Run
from transom_kernels.paged_attention.inputs import PagedBatch, PagedInputs
from transom_kernels.paged_attention.reference import paged_attention_reference
from transom_kernels.paged_attention.rule import MaskRule
from transom_kernels.quantised_kv import KvFormat
from transom_kernels.quantised_kv.format import quantise_rows

BLOCK = 16  # tokens of a cache block, as served by default
# For partial results, references in float32 and rivals' copies, none of which is of the largest slabs.
SPARE_BYTES = 8 << 30
LAYERS = 32  # of a slab, in which a block has all layers' keys and values: blocks of one layer are this far apart
Scales = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A layer's heads. Inside a block a head's tokens lie together, as in the worker's slab."""

    query: int
    kv: int
    size: int

    def row_bytes(self, kv_format: KvFormat | None) -> int:
        """Bytes of a token's keys, or of its values: in bf16, or quantised with a float32 scale for each head."""
        if kv_format is None:
            return 2 * self.kv * self.size
        return self.kv * (self.size // kv_format.numbers_per_element + 4)


def make_paged(
    heads: Heads,
    starts: list[int],
    counts: list[int],
    device: torch.device,
    *,
    window: int | None = None,
    has_sinks: bool = False,
    kv_format: KvFormat | None = None,
) -> PagedInputs:
    """Sequences with `starts[b]` tokens in the cache and `counts[b]` new ones; with a window only its blocks are kept."""
    firsts = [0 if window is None else max(0, start - window + 1) // BLOCK for start in starts]
    lengths = [-(-(start + count) // BLOCK) - first for start, count, first in zip(starts, counts, firsts, strict=True)]
    k_cache, v_cache, scales = random_caches(heads, sum(lengths), device, kv_format)
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(1)).tolist()
    tables, used = [], 0
    for length in lengths:
        tables.append(order[used : used + length])
        used += length
    k_scale, v_scale = scales or (None, None)
    return PagedInputs(
        q=torch.randn(sum(counts), heads.query, heads.size, device=device).bfloat16(),
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        batch=paged_batch(tables, firsts, starts, counts, device),
        scale=heads.size**-0.5,
        rule=MaskRule(window=window),
        sink_logits=torch.randn(heads.query, device=device) if has_sinks else None,
    )


def one_sequence(paged: PagedInputs, b: int) -> PagedInputs:
    """A sequence as if it were alone, over the same cache."""
    count = paged.batch.count_host[b]
    row = sum(paged.batch.count_host[:b])
    return replace(paged, q=paged.q[row : row + count], batch=_part(paged, [b], [paged.batch.start_host[b]], [count]))


def expected_rows(paged: PagedInputs, rows: list[int]) -> torch.Tensor:
    """Attention of some query rows in float32 [rows, H, D]: the reference, to which each row is a sequence of one new token."""
    first_rows = [sum(paged.batch.count_host[:b]) for b in range(len(paged.batch.count_host))]
    owners = [max(b for b, first in enumerate(first_rows) if first <= row) for row in rows]
    starts = [paged.batch.start_host[b] + row - first_rows[b] for b, row in zip(owners, rows, strict=True)]
    batch = _part(paged, owners, starts, [1] * len(rows))
    return paged_attention_reference(replace(paged, q=paged.q[rows].float(), batch=batch))


def some_rows(paged: PagedInputs, most: int = 6) -> list[int]:
    """Query rows worth comparing: the first and last of some sequences, and of a prompt some between."""
    ends, row = set(), 0
    for count in paged.batch.count_host:
        ends |= {row, row + count // 3, row + count - 1}
        row += count
    rows = sorted(ends)
    return rows if len(rows) <= most else sorted({rows[i * (len(rows) - 1) // (most - 1)] for i in range(most)})


def poison_tails(paged: PagedInputs) -> Run:
    """Fill the slots after each sequence's last key with NaN, in quantised caches their scales; returns what undoes that."""
    batch, blocks, offsets = paged.batch, list[int](), list[int]()
    for table, start, count in zip(batch.block_table_host, batch.start_host, batch.count_host, strict=True):
        after = range((start + count) % BLOCK or BLOCK, BLOCK)
        blocks += [table[-1]] * len(after)
        offsets += after
    parts = [scale for scale in (paged.k_scale, paged.v_scale) if scale is not None] or [paged.k_cache, paged.v_cache]
    kept = [part[blocks, offsets] for part in parts]
    for part in parts:
        part[blocks, offsets] = float("nan")

    def restore() -> None:
        for part, numbers in zip(parts, kept, strict=True):
            part[blocks, offsets] = numbers

    return restore


def dense(paged: PagedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous queries [B, H, R, D], keys and values [B, KVH, L, D], for those who know no pages; all lengths are equal."""
    batch = paged.batch
    length, count = batch.start_host[0] + batch.count_host[0], batch.count_host[0]
    table = batch.block_table.long()
    q = paged.q.view(len(table), count, *paged.q.shape[1:]).transpose(1, 2).contiguous()
    k, v = (
        cache[table].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for cache in (paged.k_cache, paged.v_cache)
    )
    return q, k, v


def random_caches(
    heads: Heads, num_blocks: int, device: torch.device, kv_format: KvFormat | None = None
) -> tuple[torch.Tensor, torch.Tensor, Scales | None]:
    """Caches of random keys and values, and their scales where they are quantised.

    Raises:
        MemoryError: the device has no room for them and for what a case needs besides.
    """
    part, layers = BLOCK * heads.kv * heads.size, 2
    if device.type == "cuda":
        own, free = 4 * num_blocks * part, torch.cuda.mem_get_info()[0]
        if own + SPARE_BYTES > free:
            raise MemoryError(
                f"needs {(own + SPARE_BYTES) / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free"
            )
        layers = min(LAYERS, (free - SPARE_BYTES) // own)  # as many as fit, where the cache is large
    stride = layers * 2 * part
    slab = torch.empty(num_blocks * stride, dtype=torch.bfloat16, device=device)
    shape, strides = (num_blocks, BLOCK, heads.kv, heads.size), (stride, heads.size, BLOCK * heads.size, 1)
    k, v = (slab.as_strided(shape, strides, at) for at in (0, part))
    at_once = max(1, (1 << 30) // part)  # blocks
    for piece in (*k.split(at_once), *v.split(at_once)):
        piece.normal_()
    if kv_format is None:
        return k, v, None
    (k, k_scale), (v, v_scale) = (quantised(cache, kv_format) for cache in (k, v))
    return k, v, (k_scale, v_scale)


def quantised(cache: torch.Tensor, kv_format: KvFormat) -> Scales:
    """A cache in a format, in which a head's tokens lie together, too; and its scales."""
    ids, tokens, kv_heads, size = cache.shape
    shape = (ids, kv_heads, tokens, size // kv_format.numbers_per_element)
    elements = torch.empty(shape, dtype=kv_format.dtype, device=cache.device).transpose(1, 2)
    scales = torch.empty(shape[:3], dtype=torch.float32, device=cache.device).transpose(1, 2)
    for begin in range(0, ids, 4096):  # all at once would take four times the cache's memory
        some = slice(begin, begin + 4096)
        elements[some], scales[some] = quantise_rows(cache[some], kv_format)
    return elements, scales


def _part(paged: PagedInputs, sequences: list[int], starts: list[int], counts: list[int]) -> PagedBatch:
    """A batch over the tables of some sequences."""
    batch = paged.batch
    tables = [batch.block_table_host[b] for b in sequences]
    return paged_batch(tables, [batch.first_block_host[b] for b in sequences], starts, counts, paged.q.device)


def paged_batch(
    tables: list[list[int]], firsts: list[int], starts: list[int], counts: list[int], device: torch.device
) -> PagedBatch:
    """Sequences with `starts[b]` tokens in the cache and `counts[b]` new ones, whose blocks are in `tables[b]` from block
    `firsts[b]` on."""

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
