"""The latent kernels against their references, in the interpreter (or on a GPU where there is one)."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.test_latent_attention import filled_cache, latent_inputs, random_slots, rows_case
from tests.matrices import matrix
from transom_kernels.latent_attention import gpu, select_rows
from transom_kernels.latent_attention.gpu import latent_attention_triton, pool_rows_triton, select_entries_triton
from transom_kernels.latent_attention.reference import (
    latent_attention_reference,
    pool_rows_reference,
    select_entries_reference,
)
from transom_kernels.launch import prefer


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    matrix([torch.float32, torch.bfloat16], [(1, 1, 1, 0), (5, 4, 7, 3), (3, 20, 36, 36)], strength=1),
)
def test_latent_attention(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    num_queries, heads, window, entries = sizes
    inputs = latent_inputs(num_queries, window, entries, heads=heads, width=20, dtype=dtype)
    out, wanted = latent_attention_triton(inputs), latent_attention_reference(inputs)
    limit = 1e-5 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(out.float(), wanted.float(), atol=limit, rtol=limit)


def test_sinks_of_any_size_and_queries_that_see_nothing() -> None:
    inputs = replace(latent_inputs(3, 9, 5), sink_logits=torch.tensor([float("-inf"), -60.0, 60.0, 0.0, 1.0, 2.0]))
    out = latent_attention_triton(inputs)
    torch.testing.assert_close(out[1:], latent_attention_reference(inputs)[1:], atol=1e-5, rtol=1e-5)
    assert out[0].eq(0).all()


@pytest.mark.parametrize(("heads", "num_entries", "top_k"), [(1, 1, 1), (16, 9, 4), (20, 70, 9)])
def test_select_entries(heads: int, num_entries: int, top_k: int) -> None:
    slots = torch.stack([torch.randperm(72)[:num_entries] for _ in range(2)])
    sequence, visible = torch.tensor([0, 1, 1]), torch.tensor([num_entries, num_entries // 2, 0])
    inputs = (torch.randn(3, heads, 24), torch.randn(3, heads), filled_cache(slots, 24), slots, sequence, visible)
    wanted = select_entries_reference(*inputs, top_k=top_k, scale=0.2)
    assert select_entries_triton(*inputs, top_k=top_k, scale=0.2).sort().values.equal(wanted.sort().values)


@pytest.mark.parametrize(("score_bytes", "rounds"), [(1, 1), (3 * 4 * 150, 1), (2**20, 2), (2**20, 8)])
def test_entries_are_the_same_however_scores_are_cut(
    score_bytes: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = torch.stack([torch.randperm(150) for _ in range(2)])
    cache, visible = filled_cache(slots, 16), torch.tensor([150, 1, 0, 64, 149, 65, 128])
    inputs = (torch.randn(7, 4, 16), torch.rand(7, 4), cache, slots, torch.tensor([0, 1, 0, 1, 1, 0, 0]), visible)
    wanted = select_entries_triton(*inputs, top_k=20, scale=0.2)
    monkeypatch.setattr(gpu, "SCORE_BYTES", score_bytes)
    monkeypatch.setattr("transom_kernels.latent_attention.gpu.score_rounds", lambda _: rounds)
    largest, empty = [], torch.empty

    def noted(size: Any, **kinds: Any) -> torch.Tensor:
        largest.append(size)
        return empty(size, **kinds)

    monkeypatch.setattr(torch, "empty", noted)
    assert select_entries_triton(*inputs, top_k=20, scale=0.2).equal(wanted)
    assert largest == [(min(7, max(1, score_bytes // 600)), 150)]


@pytest.mark.parametrize("top_k", [5, 29, 40])
def test_select_rows(top_k: int) -> None:
    case = rows_case([(0, 4), (0, 0), (28, 2)], 3)
    inputs = (case.q, torch.randn(6, 9), case.k_cache, case.batch)
    with prefer("reference"):
        wanted = select_rows(*inputs, top_k=top_k)
    assert select_rows(*inputs, top_k=top_k).equal(wanted)


@pytest.mark.parametrize(("groups", "ratio", "width"), [(1, 1, 5), (1, 6, 10), (2, 4, 150), (1, 36, 7)])
def test_pool_rows(groups: int, ratio: int, width: int) -> None:
    slots = random_slots(4, groups * ratio, fewest=1)
    first, second = (filled_cache(slots, groups * width) for _ in range(2))
    bias = torch.randn(ratio, groups * width)
    torch.testing.assert_close(
        pool_rows_triton(first, second, slots, bias), pool_rows_reference(first, second, slots, bias)
    )
