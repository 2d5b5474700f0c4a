"""DeepSeek V4's `latent_attention`, `select_entries` (indexer) and `pool_rows` (compressor), in its published sizes.

Legend: T queries, H heads, D latent width, W window rows, K chosen entries, N entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernel_cases.case import Case, Check, Prepared, Scale
from transom_kernels.latent_attention.gpu import latent_attention_triton, pool_rows_triton, select_entries_triton
from transom_kernels.latent_attention.inputs import LatentInputs

ERROR_LIMIT = 1e-2
BLOCK = 16
CHECKED = 8


def cases(scale: Scale) -> Iterator[Case]:
    """No figure is promised: shares of the floor say where it stands."""
    for tokens in scale.some((1, 16, 256, 4096), (16, 4096), (3,)):
        yield Case(
            name=f"latent attention tokens {tokens}",
            prepare=partial(_attend, tokens, scale),
            formula="rows that some query reads, slots, queries and results; 4 H (W + K) D operations for each query",
        )
        yield Case(
            name=f"latent indexer tokens {tokens}",
            prepare=partial(_select, tokens, scale),
            formula="N D keys, queries and choices; 2 H N D operations for each query",
        )
    yield Case(
        name="latent pooling",
        prepare=partial(_pool, scale.pick(8192, 4), scale),
        formula="rows and gates of every entry, and the entry",
    )


def _cache(rows: int, width: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(-(-rows // BLOCK), BLOCK, 1, width, device=device).to(dtype)


def _rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache[slots // BLOCK, slots % BLOCK, 0].double()


def _attend(tokens: int, scale: Scale, device: torch.device) -> Prepared:
    heads, width = scale.pick(64, 4), scale.pick(512, 32)
    window, entries, total = scale.pick(128, 7), scale.pick(512, 5), scale.pick(65_536, 64)
    caches = [_cache(total, width, device) for _ in range(2)]
    slots = [torch.randint(0, total, (tokens, count), device=device) for count in (window, entries)]
    q = torch.randn(tokens, heads, width, device=device, dtype=torch.bfloat16)
    sinks = torch.randn(heads, device=device)
    factor = width**-0.5

    def run() -> tuple[torch.Tensor, ...]:
        return (_run(q, caches, slots, sinks, factor),)

    def check(out: tuple[torch.Tensor, ...]) -> list[Check]:
        few = min(tokens, CHECKED)
        rows = torch.cat([_rows(cache, chosen[:few]) for cache, chosen in zip(caches, slots, strict=True)], 1)
        scores = torch.einsum("thd,tnd->thn", q[:few].double(), rows) * factor
        scores = torch.cat([scores, sinks.double()[None, :, None].expand(few, -1, 1)], 2)
        wanted = torch.einsum("thn,tnd->thd", scores.softmax(2)[..., :-1], rows)
        return [Check(got=out[0][:few], wanted=wanted, limit=ERROR_LIMIT)]

    count, read = window + entries, sum(len(chosen.unique()) for chosen in slots)
    return Prepared(
        run=run,
        check=check,
        num_bytes=2 * width * read + 2 * q.nbytes + 8 * tokens * count,
        flops=4 * tokens * heads * count * width,
        alone=lambda: [(run()[0][:1], _one(q, caches, slots, sinks, factor))],
    )


def _one(
    q: torch.Tensor, caches: list[torch.Tensor], slots: list[torch.Tensor], sinks: torch.Tensor, factor: float
) -> torch.Tensor:
    return _run(q[:1], caches, [chosen[:1] for chosen in slots], sinks, factor)


def _run(
    q: torch.Tensor, caches: list[torch.Tensor], slots: list[torch.Tensor], sinks: torch.Tensor, factor: float
) -> torch.Tensor:
    return latent_attention_triton(
        LatentInputs(
            q=q, window_cache=caches[0], window_slots=slots[0], entry_cache=caches[1], entry_slots=slots[1],
            sink_logits=sinks, scale=factor,
        )
    )  # fmt: skip


def _select(tokens: int, scale: Scale, device: torch.device) -> Prepared:
    heads, width = scale.pick(64, 4), scale.pick(128, 16)
    total, top_k = scale.pick(8192, 40), scale.pick(512, 6)
    cache, slots = _cache(total, width, device), torch.randperm(total, device=device)[None]
    q = torch.randn(tokens, heads, width, device=device, dtype=torch.bfloat16)
    weights = torch.rand(tokens, heads, device=device)
    sequence = torch.zeros(tokens, dtype=torch.int64, device=device)
    visible = torch.full((tokens,), total, dtype=torch.int64, device=device)

    def run() -> tuple[torch.Tensor, ...]:
        return (select_entries_triton(q, weights, cache, slots, sequence, visible, top_k=top_k, scale=width**-0.5),)

    def check(out: tuple[torch.Tensor, ...]) -> list[Check]:
        """By the scores of what was chosen: near-ties may go either way."""
        few, keys = min(tokens, CHECKED), _rows(cache, slots[0])
        products = torch.einsum("thd,nd->thn", q[:few].double(), keys).clamp(min=0)
        scores = torch.einsum("th,thn->tn", weights[:few].double(), products)
        got = scores.gather(1, out[0][:few]).sort(1).values
        return [Check(got=got, wanted=scores.topk(top_k, 1).values.sort(1).values, limit=1e-4)]

    return Prepared(
        run=run,
        check=check,
        num_bytes=2 * total * width + 8 * tokens * top_k + q.nbytes,
        flops=2 * tokens * heads * total * width,
    )


def _pool(entries: int, scale: Scale, device: torch.device) -> Prepared:
    width, ratio, groups = scale.pick(512, 16), 4, 2
    caches = [_cache(entries * ratio + ratio, groups * width, device, torch.float32) for _ in range(2)]
    first = torch.arange(entries, device=device)[:, None] * ratio
    slots = first + torch.arange(groups * ratio, device=device)[None]
    bias = torch.randn(ratio, groups * width, device=device)

    def check(out: tuple[torch.Tensor, ...]) -> list[Check]:
        few = min(entries, CHECKED)
        kv, gate = (_rows(cache, slots[:few]).view(few, groups, ratio, groups, width) for cache in caches)
        gate = gate + bias.double().view(1, 1, ratio, groups, width)
        own_kv, own_gate = (torch.cat([part[:, :, :, g][:, g] for g in range(groups)], 1) for part in (kv, gate))
        return [Check(got=out[0][:few], wanted=(own_kv * own_gate.softmax(1)).sum(1), limit=1e-5)]

    return Prepared(
        run=lambda: (pool_rows_triton(*caches, slots, bias),),
        check=check,
        num_bytes=2 * 4 * entries * groups * ratio * width + 4 * entries * width,
    )
