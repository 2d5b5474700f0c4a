"""Latent attention, pooling and the indexer against their references, over strided caches that hold NaN in unused slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from transom_kernels.latent_attention import latent_attention, pool_rows, read_rows, select_entries, write_rows
from transom_kernels.latent_attention import rows as rows_module
from transom_kernels.latent_attention.reference import (
    latent_attention_reference,
    pool_rows_reference,
    select_entries_reference,
)
from transom_kernels.launch import prefer


def filled_cache(slots: list[int], width: int, *, ids: int = 12, size: int = 3, dtype=torch.float32) -> torch.Tensor:
    """A cache [ids, size, 1, width] with gaps between blocks, random at `slots` and NaN elsewhere."""
    stride = size * width + 24
    slab = torch.full((ids * stride,), float("nan"), dtype=dtype)
    cache = slab.as_strided((ids, size, 1, width), (stride, width, size * width, 1), 8)
    write_rows(torch.randn(len(slots), width).to(dtype), cache, torch.tensor(slots, dtype=torch.int64))
    return cache


def random_slots(num_queries: int, most: int, *, fewest: int = 0) -> torch.Tensor:
    """Distinct slots of 36, each query its own number of them, scattered among -1."""
    slots = torch.full((num_queries, most), -1, dtype=torch.int64)
    for row in slots:
        places = torch.randperm(most)[: int(torch.randint(fewest, most + 1, ()))]
        row[places] = torch.randperm(36)[: len(places)]
    return slots


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(3)


@pytest.fixture(params=[1, 500, 2**20, None], ids=lambda size: f"tiles_of_{size}" if size else "kernels")
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch with tiles of some sizes, and the CPU kernels."""
    if request.param is None:
        yield
        return
    monkeypatch.setattr(rows_module, "TILE_ELEMENTS", request.param)
    with prefer("reference"):
        yield


def present(slots: torch.Tensor) -> list[int]:
    return sorted({slot for slot in slots.flatten().tolist() if slot >= 0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_read_where_they_were_written(dtype: torch.dtype) -> None:
    cache = filled_cache([], 10, dtype=dtype)
    slots = torch.tensor([4, 35, 0, 7])
    rows = torch.randn(4, 10).to(dtype)
    write_rows(rows, cache, slots)
    read = read_rows(cache, torch.tensor([[35, -1], [7, 4]]))
    torch.testing.assert_close(read, torch.stack([torch.stack([rows[1], torch.zeros(10).to(dtype)]), rows[[3, 0]]]))
    with pytest.raises(ValueError, match="rows of 9"):
        write_rows(rows[:, :9], cache, slots)


@pytest.mark.parametrize(("num_queries", "window", "entries"), [(1, 1, 0), (5, 7, 3), (17, 3, 11)])
def test_latent_attention(implementation: None, num_queries: int, window: int, entries: int) -> None:
    window_slots, entry_slots = random_slots(num_queries, window), random_slots(num_queries, entries)
    q, sinks = torch.randn(num_queries, 4, 10), torch.randn(4)
    caches = [filled_cache(present(slots), 10) for slots in (window_slots, entry_slots)]
    out = latent_attention(q, caches[0], window_slots, sinks, scale=0.7, entry_cache=caches[1], entry_slots=entry_slots)
    wanted = latent_attention_reference(
        q, caches[0], window_slots, sinks, scale=0.7, entry_cache=caches[1], entry_slots=entry_slots
    )
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_latent_attention_in_bfloat16_and_without_entries() -> None:
    slots = random_slots(9, 6, fewest=1)
    q = torch.randn(9, 2, 16).bfloat16()
    cache = filled_cache(present(slots), 16, dtype=torch.bfloat16)
    out = latent_attention(q, cache, slots, torch.zeros(2), scale=0.25)
    wanted = latent_attention_reference(
        q.float(), cache.float(), slots, torch.zeros(2), scale=0.25, entry_cache=cache, entry_slots=slots[:, :0]
    )
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("ratio", "groups"), [(4, 2), (5, 1), (1, 2)])
def test_pooled_rows(implementation: None, ratio: int, groups: int) -> None:
    slots = torch.stack([torch.randperm(36)[: groups * ratio] for _ in range(6)])
    slots[0, : (groups - 1) * ratio] = -1  # the first entry has no group before its own
    kv, gate = (filled_cache(list(range(36)), groups * 6) for _ in range(2))
    for cache in (kv, gate):  # nothing else may be read
        for slot in set(range(36)) - set(present(slots)):
            cache[slot // 3, slot % 3] = float("nan")
    bias = torch.randn(ratio, groups * 6)
    torch.testing.assert_close(
        pool_rows(kv, gate, slots, bias), pool_rows_reference(kv, gate, slots, bias), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("top_k", [1, 4, 30])
def test_selected_entries(implementation: None, top_k: int) -> None:
    slots = torch.stack([torch.randperm(36)[:11], torch.randperm(36)[:11], torch.full((11,), -1)])
    sequence = torch.tensor([0, 0, 1, 2, 1, 0, 0])
    num_visible = torch.tensor([1, 2, 11, 0, 4, 0, 9])
    q, weights = torch.randn(7, 16, 10), torch.randn(7, 16)
    keys = filled_cache(present(slots), 10)
    options: dict[str, Any] = {"top_k": top_k, "scale": 0.1}
    chosen = select_entries(q, weights, keys, slots, sequence, num_visible, **options)
    assert chosen.shape == (7, min(top_k, 11))
    wanted = select_entries_reference(q, weights, keys, slots, sequence, num_visible, **options)
    for row, expected, visible in zip(chosen.tolist(), wanted, num_visible.tolist(), strict=True):
        valid = [entry for entry in row if entry >= 0]
        assert len(valid) == min(top_k, visible)
        assert set(valid) == expected


def test_what_does_not_fit_is_refused() -> None:
    cache, slots = filled_cache([0], 8), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="one head of q's width"):
        latent_attention(torch.zeros(2, 4, 9), cache, slots, torch.zeros(4), scale=1.0)
    with pytest.raises(ValueError, match="a row of them for each"):
        latent_attention(torch.zeros(3, 4, 8), cache, slots, torch.zeros(4), scale=1.0)
    with pytest.raises(ValueError, match="one float32 for each of 4 heads"):
        latent_attention(torch.zeros(2, 4, 8), cache, slots, torch.zeros(3), scale=1.0)
    with pytest.raises(ValueError, match="belong together"):
        latent_attention(torch.zeros(2, 4, 8), cache, slots, torch.zeros(4), scale=1.0, entry_cache=cache)
    with pytest.raises(ValueError, match="as many series as groups"):
        pool_rows(cache, cache, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="must be float32"):
        pool_rows(cache.half(), cache.half(), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, 8))
    with pytest.raises(ValueError, match="a weight per query head"):
        select_entries(
            torch.zeros(2, 4, 8), torch.zeros(2, 3), cache, slots, slots[:, 0], slots[:, 0], top_k=1, scale=1.0
        )
