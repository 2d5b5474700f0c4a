"""`policy_attention` and `add_block_mass`: a window with sink tokens over compact tables, decoding and a prompt's chunk, over
caches of 16 bits and quantised ones.

Legend: T query tokens, H query heads, KVH KV heads, D head width, P block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernel_cases.attention import ERROR_LIMIT, LLAMA, TINY
from kernel_cases.case import Case, Check, Prepared, Scale, Tensors
from kernel_cases.paged import BLOCK, Heads, cached_rows, quantised, random_caches
from transom_kernels.policy_attention import PolicyBatch
from transom_kernels.policy_attention.inputs import PolicyInputs
from transom_kernels.policy_attention.triton.launcher import add_block_mass_triton, policy_attention_triton
from transom_kernels.quantised_kv import FORMATS, KvFormat

SINKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`count` new tokens of `batch` sequences behind `start` tokens, of which a window of `window` and the sink tokens are kept."""

    batch: int
    start: int
    count: int
    window: int

    @property
    def blocks(self) -> list[int]:
        """The logical blocks that the table has."""
        first_seen = max(0, self.start - self.window + 1)
        run = range(first_seen // BLOCK, (self.start + self.count - 1) // BLOCK + 1)
        return sorted({*range(-(-SINKS // BLOCK)), *run})

    def seen_by(self, position: int) -> list[int]:
        """The keys that the query at a position sees."""
        low = max(0, position - self.window + 1)
        return [*range(min(SINKS, low)), *range(low, position + 1)]

    @property
    def num_pairs(self) -> int:
        """Pairs of query and key."""
        return self.batch * sum(len(self.seen_by(self.start + row)) for row in range(self.count))

    @property
    def num_keys(self) -> int:
        """Keys that some query sees."""
        low = max(0, self.start - self.window + 1)
        return self.batch * (min(SINKS, low) + self.start + self.count - low)


@dataclass(slots=True, kw_only=True)
class PolicyRows:
    """Queries, caches and their batch; `scales` of quantised keys and values."""

    q: torch.Tensor  # [T, H, D]
    sink_q: torch.Tensor  # [T, H, D]
    k_cache: torch.Tensor  # [ids, P, KVH, D]
    v_cache: torch.Tensor
    batch: PolicyBatch
    scales: tuple[torch.Tensor | None, torch.Tensor | None]


def cases(scale: Scale) -> Iterator[Case]:
    """All of them."""
    window, context = scale.pick(1024, 20), scale.pick(32_768, 90)
    for kv_format in (None, *FORMATS.values()):
        for batch in scale.some((16, 64), (16,), (2,)):
            rows = Rows(batch=batch, start=context - 4, count=1, window=window)
            yield _attention_case("decode", rows, kv_format, scale)
            yield _mass_case(rows, kv_format, scale)
        chunk = Rows(batch=1, start=context - 4, count=scale.pick(2048, 20), window=window)
        yield _attention_case("prompt", chunk, kv_format, scale)


def _attention_case(kind: str, rows: Rows, kv_format: KvFormat | None, scale: Scale) -> Case:
    return Case(
        name=f"policy {kind} {_stored(kv_format)} window {rows.window} batch {rows.batch} tokens {rows.count}",
        prepare=partial(_attention, TINY if scale.is_tiny else LLAMA, rows, kv_format),
        formula="visible keys and values of every sequence, both queries and results; 4 H D for every visible pair",
    )


def _mass_case(rows: Rows, kv_format: KvFormat | None, scale: Scale) -> Case:
    return Case(
        name=f"policy mass {_stored(kv_format)} window {rows.window} batch {rows.batch}",
        prepare=partial(_mass, TINY if scale.is_tiny else LLAMA, rows, kv_format),
        formula="visible keys of every sequence and both queries",
    )


def _attention(heads: Heads, rows: Rows, kv_format: KvFormat | None, device: torch.device) -> Prepared:
    made, chosen = _make(heads, rows, kv_format, device), _some_rows(rows)

    def check(out: Tensors) -> list[Check]:
        wanted = torch.stack([_expected(made, rows, row)[0] for row in chosen])
        return [Check(got=out[0][chosen], wanted=wanted, limit=ERROR_LIMIT)]

    def alone() -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole, last = _attend(made), rows.batch - 1
        own = slice(last * rows.count, (last + 1) * rows.count)
        return [(whole[own], _attend(_one_sequence(made, rows, last)))]

    return Prepared(
        run=lambda: (_attend(made),),
        check=check,
        num_bytes=rows.num_keys * 2 * _row_bytes(heads, kv_format) + 3 * made.q.nbytes,
        flops=4 * heads.query * heads.size * rows.num_pairs,
        alone=alone,
        traps=lambda: _poison_tails(made, rows),
    )


def _mass(heads: Heads, rows: Rows, kv_format: KvFormat | None, device: torch.device) -> Prepared:
    made = _make(heads, rows, kv_format, device)
    statistics = torch.empty(*made.q.shape[:2], 2, dtype=torch.float32, device=device)
    _attend(made, statistics)
    mass = torch.zeros(made.batch.block_table.shape, dtype=torch.float32, device=device)

    def add() -> None:
        add_block_mass_triton(mass, _inputs(made, statistics))

    def run() -> Tensors:
        add()
        return (mass,)

    def check(out: Tensors) -> list[Check]:
        wanted = torch.stack([_expected(made, rows, row)[1] for row in range(rows.batch)])  # one token a sequence
        return [Check(got=out[0], wanted=wanted, limit=ERROR_LIMIT)]

    return Prepared(
        run=run,
        timed=add,
        reset=mass.zero_,
        check=check,
        num_bytes=rows.num_keys * _row_bytes(heads, kv_format) + 2 * made.q.nbytes,
        flops=2 * heads.query * heads.size * rows.num_pairs,
    )


def _attend(made: PolicyRows, statistics: torch.Tensor | None = None) -> torch.Tensor:
    return policy_attention_triton(_inputs(made, statistics))


def _inputs(made: PolicyRows, statistics: torch.Tensor | None) -> PolicyInputs:
    return PolicyInputs(
        q=made.q, k_cache=made.k_cache, v_cache=made.v_cache, batch=made.batch,
        scale=_score_scale(made), sink_q=made.sink_q, statistics=statistics,
        k_scale=made.scales[0], v_scale=made.scales[1],
    )  # fmt: skip


def _score_scale(made: PolicyRows) -> float:
    return float(made.q.shape[2] ** -0.5)


def _make(heads: Heads, rows: Rows, kv_format: KvFormat | None, device: torch.device) -> PolicyRows:
    num_blocks = len(rows.blocks)
    k_cache, v_cache = random_caches(heads, rows.batch * num_blocks, device)
    order = torch.randperm(len(k_cache), generator=torch.Generator().manual_seed(1)).int()
    queries = torch.randn(2, rows.batch * rows.count, heads.query, heads.size, device=device).to(k_cache.dtype)
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if kv_format is not None:
        (k_cache, k_scale), (v_cache, v_scale) = (quantised(cache, kv_format) for cache in (k_cache, v_cache))
        scales = (k_scale, v_scale)
    table = order.view(rows.batch, num_blocks).to(device)
    return PolicyRows(
        q=queries[0], sink_q=queries[1], k_cache=k_cache, v_cache=v_cache, batch=_batch(rows, table), scales=scales
    )


def _batch(rows: Rows, block_table: torch.Tensor) -> PolicyBatch:
    device, size = block_table.device, len(block_table)

    def each(value: int) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.int32, device=device)

    return PolicyBatch(
        block_size=BLOCK,
        block_table=block_table.contiguous(),
        key_blocks=torch.tensor([rows.blocks] * size, dtype=torch.int32, device=device),
        num_columns=each(len(rows.blocks)),
        window=each(rows.window),
        sinks=each(SINKS),
        start=each(rows.start),
        query_offset=torch.arange(size + 1, dtype=torch.int32, device=device) * rows.count,
        count_host=[rows.count] * size,
    )


def _one_sequence(made: PolicyRows, rows: Rows, b: int) -> PolicyRows:
    own = slice(b * rows.count, (b + 1) * rows.count)
    return PolicyRows(
        q=made.q[own],
        sink_q=made.sink_q[own],
        k_cache=made.k_cache,
        v_cache=made.v_cache,
        batch=_batch(rows, made.batch.block_table[b : b + 1]),
        scales=made.scales,
    )


def _expected(made: PolicyRows, rows: Rows, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [H, D] of a query row in float64, and its probability by column of the table."""
    b, position = row // rows.count, rows.start + row % rows.count
    keys = torch.tensor(rows.seen_by(position), device=made.q.device)
    logical = torch.tensor(rows.blocks, device=made.q.device)
    columns = torch.searchsorted(logical, keys // BLOCK)
    blocks = made.batch.block_table[b].long()[columns]
    caches = zip((made.k_cache, made.v_cache), made.scales, strict=True)
    k, v = (cached_rows(cache, scale, blocks, keys % BLOCK) for cache, scale in caches)
    group = made.q.shape[1] // k.shape[1]
    q, sink_q = (queries[row].double().view(k.shape[1], group, -1) for queries in (made.q, made.sink_q))
    scores, sink_scores = (torch.einsum("kgd,lkd->kgl", queries, k) for queries in (q, sink_q))
    weights = (torch.where(keys < SINKS, sink_scores, scores) * _score_scale(made)).softmax(2)
    mass = torch.zeros(len(rows.blocks), dtype=torch.float64, device=made.q.device)
    mass.index_add_(0, columns, weights.sum(dim=(0, 1)))
    return torch.einsum("kgl,lkd->kgd", weights, v).flatten(0, 1), mass


def _some_rows(rows: Rows) -> list[int]:
    """Query rows worth comparing: the first and last, and some between."""
    count = rows.batch * rows.count
    return sorted({0, count // 3, count // 2, count - 1})


def _poison_tails(made: PolicyRows, rows: Rows) -> Callable[[], None]:
    """Fill the slots behind each sequence's last key with NaN, their scales in quantised caches; returns what undoes that."""
    offset, kept = (rows.start + rows.count) % BLOCK, []
    poisoned = [scale for scale in made.scales if scale is not None] or [made.k_cache, made.v_cache]
    if offset:
        last = made.batch.block_table[:, -1].long()
        kept = [(cache, cache[last, offset:].clone()) for cache in poisoned]
        for cache, _ in kept:
            cache[last, offset:] = float("nan")

    def restore() -> None:
        for cache, numbers in kept:
            cache[last, offset:] = numbers

    return restore


def _stored(kv_format: KvFormat | None) -> str:
    return "bf16" if kv_format is None else kv_format.name


def _row_bytes(heads: Heads, kv_format: KvFormat | None) -> int:
    """Of a token's keys, or values, with their scales."""
    if kv_format is None:
        return 2 * heads.kv * heads.size
    return heads.kv * (heads.size // kv_format.numbers_per_element + 4)
