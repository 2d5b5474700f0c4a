"""Latent attention, pooling and the indexer: torch against one query and one entry at a time, and the CPU kernel against torch.

Latent rows are in strided caches that hold NaN in unused slots; tests of other kernels use them, too.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.paged_case import Case, Sequence, Shape, make_case
from tests.matrices import matrix
from transom_kernels.kv_write.reference import write_rows
from transom_kernels.latent_attention import (
    cpu_selection,
    latent_attention,
    pool_rows,
    reference,
    select_entries,
    select_rows,
)
from transom_kernels.latent_attention.cpu import fits_cpu_kernel, latent_attention_cpu
from transom_kernels.latent_attention.reference import LatentInputs, latent_attention_reference
from transom_kernels.launch import prefer

IDS, SIZE = 50, 3  # blocks of a cache, and rows of a block


def filled_cache(slots: torch.Tensor, width: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A cache [IDS, SIZE, 1, width] with gaps between blocks, random at `slots` and NaN elsewhere."""
    stride = SIZE * width + 24
    slab = torch.full((IDS * stride,), float("nan"), dtype=dtype)
    cache = slab.as_strided((IDS, SIZE, 1, width), (stride, width, SIZE * width, 1), 8)
    used = slots[slots >= 0].unique()
    write_rows(torch.randn(len(used), 1, width), cache, used)
    return cache


def random_slots(num_queries: int, most: int, *, fewest: int = 0) -> torch.Tensor:
    """Distinct slots, each query its own number of them, scattered among -1."""
    slots = torch.full((num_queries, most), -1, dtype=torch.int64)
    for row in slots:
        places = torch.randperm(most)[: int(torch.randint(fewest, most + 1, ()))]
        row[places] = torch.randperm(IDS * SIZE)[: len(places)]
    return slots


def latent_inputs(
    num_queries: int, window: int, entries: int, *, heads: int = 6, width: int = 40, dtype: torch.dtype = torch.float32
) -> LatentInputs:
    """Queries whose window is mostly a run of rows, and whose entries lie anywhere; the first query sees nothing."""
    window_slots, entry_slots = random_slots(num_queries, window), random_slots(num_queries, entries)
    run = torch.arange(num_queries)[:, None] + torch.arange(window) - window // 3
    window_slots[1::2] = run[1::2].clamp(min=-1)
    window_slots[0], entry_slots[0] = -1, -1
    return LatentInputs(
        q=torch.randn(num_queries, heads, width).to(dtype),
        window_cache=filled_cache(window_slots, width, dtype=dtype),
        window_slots=window_slots,
        entry_cache=filled_cache(entry_slots, width, dtype=dtype),
        entry_slots=entry_slots,
        sink_logits=torch.randn(heads),
        scale=0.2,
    )


TILES = [1, 500, 2**20]
DTYPES = [torch.float32, torch.bfloat16]


def row(cache: torch.Tensor, slot: int) -> torch.Tensor:
    return cache[slot // SIZE, slot % SIZE, 0].double()


@pytest.mark.parametrize("tile", TILES)
def test_attention_in_torch(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE_ELEMENTS", tile)
    inputs = latent_inputs(5, 7, 3, heads=4, width=10)
    out = latent_attention_reference(inputs)
    for t in range(5):
        rows = [row(cache, slot) for cache, slots in inputs.places for slot in slots[t].tolist() if slot >= 0]
        for head in range(4):
            scores = [float(inputs.q[t, head].double() @ one) * inputs.scale for one in rows]
            weights = torch.tensor([*scores, float(inputs.sink_logits[head])], dtype=torch.float64).softmax(0)
            wanted = sum((weight * one for weight, one in zip(weights, rows, strict=False)), torch.zeros(10).double())
            torch.testing.assert_close(out[t, head].double(), wanted, atol=1e-5, rtol=1e-5)


def check(inputs: LatentInputs) -> torch.Tensor:
    assert fits_cpu_kernel(inputs)
    out, limit = latent_attention_cpu(inputs), 2e-5 if inputs.q.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.float(), latent_attention_reference(inputs).float(), atol=limit, rtol=limit)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "entries"), [(1, 0), (16, 3), (100, 140), (150, 150)])
def test_rows_of_window_and_entries_on_cpus(dtype: torch.dtype, window: int, entries: int) -> None:
    check(latent_inputs(3, window, entries, dtype=dtype))


def test_a_window_alone() -> None:
    inputs = latent_inputs(5, 20, 0)
    out = latent_attention(replace(inputs, entry_cache=None, entry_slots=None))
    torch.testing.assert_close(out, latent_attention_reference(inputs), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("shape", "tile"), matrix([(4, 2), (5, 1), (1, 2)], TILES, strength=1))
def test_pooled_rows(shape: tuple[int, int], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE_ELEMENTS", tile)
    ratio, groups = shape
    slots = random_slots(6, groups * ratio, fewest=groups * ratio)
    slots[0, : (groups - 1) * ratio] = -1  # the first entry has no group before its own
    kv, gate, bias = filled_cache(slots, groups * 6), filled_cache(slots, groups * 6), torch.randn(ratio, groups * 6)
    for pooled, entry in zip(pool_rows(kv, gate, slots, bias), slots.tolist(), strict=True):
        values, weights = [], []
        for place, slot in enumerate(entry):
            if slot >= 0:
                series = slice(place // ratio * 6, (place // ratio + 1) * 6)
                values.append(row(kv, slot)[series])
                weights.append((row(gate, slot) + bias[place % ratio])[series])
        wanted = (torch.stack(values) * torch.stack(weights).softmax(0)).sum(0)
        torch.testing.assert_close(pooled.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("top_k", "tile"), matrix([1, 4, 30], TILES, strength=1))
def test_selected_entries(top_k: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE_ELEMENTS", tile)
    slots = torch.stack([torch.randperm(36)[:11], torch.randperm(36)[:11], torch.full((11,), -1)])
    sequence, num_visible = torch.tensor([0, 0, 1, 2, 1, 0, 0]), torch.tensor([1, 2, 11, 0, 4, 0, 9])
    q, weights, keys = torch.randn(7, 16, 10), torch.randn(7, 16), filled_cache(slots, 10)
    options: dict[str, Any] = {"top_k": top_k, "scale": 0.1}
    chosen = select_entries(q, weights, keys, slots, sequence, num_visible, **options)
    assert chosen.shape == (7, min(top_k, 11))
    for t, entries in enumerate(chosen.tolist()):
        table, count = slots[sequence[t]].tolist(), int(num_visible[t])
        products = [(q[t].double() @ row(keys, slot)).relu() @ weights[t].double() for slot in table[:count]]
        best = sorted(range(count), key=lambda entry: -float(products[entry]))[:top_k]
        assert sorted(entries) == sorted([*best, *[-1] * (len(entries) - len(best))])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 18, 29, 400])
@pytest.mark.parametrize(("size", "last"), [(3, 7), (16, 270)])
def test_selected_rows(size: int, last: int, top_k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots in the order of positions: all that a query sees, up to `top_k`; then those of the best scores."""
    case = rows_case([(0, 5), (0, 0), (28, 1), (last, 2)], size, dtype)
    batch, weights = case.batch, torch.randn(8, 9).to(dtype)
    chosen, t = select_rows(case.q, weights, case.k_cache, batch, top_k=top_k), 0
    for table, keys, start in zip(batch.block_table_host, case.keys, batch.start_host, strict=True):
        for count in range(start + 1, len(keys) + 1):
            scores = (weights[t].double() @ (case.q[t].double() @ keys[:count, 0].double().T).relu()).tolist()
            best = sorted(sorted(range(count), key=lambda n: -scores[n])[:top_k])
            slots = [table[n // size] * size + n % size for n in best]
            assert chosen[t].tolist() == slots + [-1] * (chosen.shape[1] - len(best))
            t += 1
    with prefer("reference"):
        assert select_rows(case.q, weights, case.k_cache, batch, top_k=top_k).equal(chosen)
    monkeypatch.setattr(cpu_selection, "MAX_SCORE_BYTES", 3 * 4 * 512)  # a few queries at a time
    assert select_rows(case.q, weights, case.k_cache, batch, top_k=top_k).equal(chosen)
    slots = [batch.block_table_host[2][n // size] * size + n % size for n in range(min(29, top_k))]
    chosen = select_rows(case.q, weights, case.k_cache.zero_(), batch, top_k=top_k)[5]
    assert chosen.tolist() == slots + [-1] * (len(chosen) - len(slots))  # the first of equal scores


def rows_case(sequences: list[tuple[int, int]], size: int, dtype: torch.dtype = torch.float32) -> Case:
    """An indexer's queries: sequences of (start, new tokens) in blocks of `size` tokens."""
    shape = Shape(heads=9, kv_heads=1, size=20, block_size=size, dtype=dtype)
    return make_case([Sequence(start=start, count=count) for start, count in sequences], shape)


def test_what_does_not_fit_is_refused() -> None:
    cache, slots = filled_cache(torch.tensor([0]), 8), torch.zeros(2, 1, dtype=torch.int64)
    q, sinks = torch.zeros(2, 4, 8), torch.zeros(4)
    good = LatentInputs(q=q, window_cache=cache, window_slots=slots, sink_logits=sinks, scale=1.0)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"q": torch.zeros(2, 4, 9)}, "one head of q's width"),
        ({"q": torch.zeros(3, 4, 8)}, "a row of them for each"),
        ({"sink_logits": torch.zeros(3)}, "one float32 for each of 4 heads"),
        ({"entry_cache": cache}, "belong together"),
    ]
    for changes, words in refused:
        with pytest.raises(ValueError, match=words):
            latent_attention(replace(good, **changes))
    with pytest.raises(ValueError, match="a weight per query head in q's dtype"):
        select_rows(q, torch.zeros(2, 3), cache, rows_case([(0, 2)], SIZE).batch, top_k=1)
    with pytest.raises(ValueError, match="as many series as groups"):
        pool_rows(cache, cache, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="must be float32"):
        pool_rows(cache.half(), cache.half(), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="a weight per query head"):
        select_entries(q, torch.zeros(2, 3), cache, slots, slots[:, 0], slots[:, 0], top_k=1, scale=1.0)


def small_case() -> None:
    check(latent_inputs(3, 120, 150, dtype=torch.bfloat16))
