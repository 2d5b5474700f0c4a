"""The latent kernels against their references, in the interpreter (or on a GPU where there is one)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_latent_attention import filled_cache, present, random_slots
from transom_kernels.latent_attention import tuning
from transom_kernels.latent_attention.gpu import latent_attention_triton, pool_rows_triton, select_entries_triton
from transom_kernels.latent_attention.reference import (
    latent_attention_reference,
    pool_rows_reference,
    select_entries_reference,
)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_queries", "heads", "window", "entries"), [(1, 1, 1, 0), (5, 4, 7, 3), (3, 20, 36, 36)])
def test_latent_attention(dtype: torch.dtype, num_queries: int, heads: int, window: int, entries: int) -> None:
    window_slots, entry_slots = random_slots(num_queries, window), random_slots(num_queries, entries)
    q, sinks = torch.randn(num_queries, heads, 20).to(dtype), torch.randn(heads)
    caches = [filled_cache(present(slots), 20, dtype=dtype) for slots in (window_slots, entry_slots)]
    inputs = (q, caches[0], window_slots, sinks)
    options: dict[str, Any] = {"scale": 0.3, "entry_cache": caches[1], "entry_slots": entry_slots}
    out, wanted = latent_attention_triton(*inputs, **options), latent_attention_reference(*inputs, **options)
    limit = 1e-5 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(out.float(), wanted.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("sink", [float("-inf"), -60.0, 60.0])
def test_sinks_of_any_size_and_queries_that_see_nothing(sink: float) -> None:
    slots = torch.tensor([[3, -1], [-1, -1]])
    q, cache, sinks = torch.randn(2, 3, 16), filled_cache([3], 16), torch.tensor([sink, 0.0, 1.0])
    out = latent_attention_triton(q, cache, slots, sinks, scale=1.0)
    weight = torch.stack([torch.stack([q[0, h] @ cache[1, 0, 0], sinks[h]]).softmax(0)[0] for h in range(3)])
    torch.testing.assert_close(out[0], weight[:, None] * cache[1, 0, 0])
    assert out[1].eq(0).all()


@pytest.mark.parametrize(("heads", "num_entries", "top_k"), [(1, 1, 1), (16, 9, 4), (20, 70, 9)])
def test_select_entries(heads: int, num_entries: int, top_k: int) -> None:
    slots = torch.stack([torch.randperm(72)[:num_entries] for _ in range(2)])
    cache = filled_cache(present(slots), 24, ids=24)
    sequence, visible = torch.tensor([0, 1, 1]), torch.tensor([num_entries, num_entries // 2, 0])
    inputs = (torch.randn(3, heads, 24), torch.randn(3, heads), cache, slots, sequence, visible)
    wanted = select_entries_reference(*inputs, top_k=top_k, scale=0.2)
    got = select_entries_triton(*inputs, top_k=top_k, scale=0.2)
    assert [{entry for entry in row if entry >= 0} for row in got.tolist()] == wanted


@pytest.mark.parametrize(("score_bytes", "rounds"), [(1, 1), (3 * 4 * 150, 1), (2**20, 2), (2**20, 8)])
def test_entries_are_the_same_however_scores_are_cut(
    score_bytes: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = torch.stack([torch.randperm(150) for _ in range(2)])
    cache = filled_cache(list(range(150)), 16, ids=50)
    visible = torch.tensor([150, 1, 0, 64, 149, 65, 128])
    inputs = (torch.randn(7, 4, 16), torch.rand(7, 4), cache, slots, torch.tensor([0, 1, 0, 1, 1, 0, 0]), visible)
    wanted = select_entries_triton(*inputs, top_k=20, scale=0.2)
    monkeypatch.setattr(tuning, "SCORE_BYTES", score_bytes)
    monkeypatch.setattr("transom_kernels.latent_attention.gpu.score_rounds", lambda _: rounds)
    largest, empty = [], torch.empty

    def noted(size: Any, **kinds: Any) -> torch.Tensor:
        largest.append(size)
        return empty(size, **kinds)

    monkeypatch.setattr(torch, "empty", noted)
    assert select_entries_triton(*inputs, top_k=20, scale=0.2).equal(wanted)
    assert largest == [(min(7, max(1, score_bytes // 600)), 150)]
    seen = [{entry for entry in row if entry >= 0} for row in wanted.tolist()]
    assert seen == select_entries_reference(*inputs, top_k=20, scale=0.2)


def test_scores_at_once_have_a_bound() -> None:
    for num_entries in (1, 8192, 32_768, 262_144, 2**26):
        queries = tuning.queries_at_once(num_entries)
        assert queries == 1 or 4 * queries * num_entries <= tuning.SCORE_BYTES


@pytest.mark.parametrize(("groups", "ratio", "width"), [(1, 1, 5), (1, 6, 10), (2, 4, 150), (1, 36, 7)])
def test_pool_rows(groups: int, ratio: int, width: int) -> None:
    slots = random_slots(4, groups * ratio, fewest=1)
    first, second = (filled_cache(present(slots), groups * width) for _ in range(2))
    bias = torch.randn(ratio, groups * width)
    torch.testing.assert_close(
        pool_rows_triton(first, second, slots, bias), pool_rows_reference(first, second, slots, bias)
    )
