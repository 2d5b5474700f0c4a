"""The CPU kernel of `latent_attention`: many rows, rows in runs, heads in several items, batches, threads, memory."""

from __future__ import annotations

import pytest
import torch

from tests.cpu_threads import kernel_threads
from tests.kernels.checked import run_checked, run_in_child
from transom_kernels.latent_attention import latent_attention
from transom_kernels.latent_attention.cpu import fits_cpu_kernel
from transom_kernels.latent_attention.reference import latent_attention_reference

HEADS, WIDTH, IDS, ROWS = 6, 40, 90, 8


def make_case(num_queries: int, window: int, entries: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """Queries whose window is a run of rows, and whose entries lie anywhere; rows that no query reads are NaN."""
    generator = torch.Generator().manual_seed(window + entries)
    caches = []
    for count, gap in ((window + num_queries, 0), (entries, 3)):
        cache = torch.full((IDS, ROWS, 1, WIDTH + gap), float("nan"))[..., :WIDTH]
        slots = torch.arange(count)
        cache[slots // ROWS, slots % ROWS] = torch.randn(count, 1, WIDTH, generator=generator)
        caches.append(cache.to(dtype) if gap == 0 else torch.nn.functional.pad(cache.to(dtype), (0, gap))[..., :WIDTH])
    window_slots = torch.arange(num_queries)[:, None] + torch.arange(window) - window // 3
    entry_slots = torch.stack([torch.randperm(entries, generator=generator) for _ in range(num_queries)])
    entry_slots[:, 1::5] = -1
    q = torch.randn(num_queries, HEADS, WIDTH, generator=generator).to(dtype)
    sinks = torch.randn(HEADS, generator=generator)
    return {"q": q, "window_slots": window_slots.clamp(min=-1), "entry_slots": entry_slots}, {
        "window_cache": caches[0],
        "entry_cache": caches[1],
        "sink_logits": sinks,
        "scale": 0.2,
    }


def check(num_queries: int, window: int, entries: int, dtype: torch.dtype) -> None:
    rows, shared = make_case(num_queries, window, entries, dtype)
    assert fits_cpu_kernel(
        rows["q"], shared["window_cache"], rows["window_slots"], shared["entry_cache"], rows["entry_slots"]
    )
    limit = 2e-5 if dtype == torch.float32 else 3e-2
    expected = latent_attention_reference(rows["q"].float(), **{k: v for k, v in rows.items() if k != "q"}, **shared)
    torch.testing.assert_close(latent_attention(**rows, **shared).float(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "entries"), [(1, 0), (16, 3), (100, 180), (300, 400)])
def test_rows_of_window_and_entries(dtype, window, entries):
    check(3, window, entries, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_does_not_depend_on_its_batch_or_on_threads(dtype):
    rows, shared = make_case(5, 90, 300, dtype)
    expected = latent_attention(**rows, **shared)
    for threads in (1, 3):
        with kernel_threads(threads):
            assert torch.equal(latent_attention(**rows, **shared), expected)
    for query in range(5):
        alone = {name: tensor[query : query + 1] for name, tensor in rows.items()}
        assert torch.equal(latent_attention(**alone, **shared), expected[query : query + 1])


def small_case() -> None:
    check(2, 20, 280, torch.bfloat16)


def test_no_access_outside_of_its_memory():
    run_checked(small_case)


@pytest.mark.exhaustive
def test_a_processor_without_pairs():
    run_in_child(small_case, TRANSOM_CPU="haswell")
